"""Checkpoints written in parts by several processes: any number of processes can read and verify them."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import exit_code, lap, process, tiny_recipe, write_text
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lapcli import checkpoint
from lapcli.recipe import recipe_to_yaml
from lapcli.runs import read_run
from lapcli.runtime.errors import DataError, LapError
from lapcli.runtime.ranks import World
from lapcli.training.metrics import read_metrics, without_times


def tensors(offset: float = 0.0) -> dict[str, torch.Tensor]:
    """Row counts that do not divide, fewer rows than processes, another dtype, and a counter."""
    draws = torch.Generator().manual_seed(0)
    return {
        "matrix": torch.randn(7, 3, generator=draws) + offset,
        "short": torch.randn(1, 5, generator=draws),
        "half": torch.randn(4, generator=draws).bfloat16(),
        "step/matrix": torch.tensor(3.0),
    }


def join(rank: int, size: int, store: str) -> World:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    return World(rank, size, torch.device("cpu"))


def sharded(given: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    if size == 1:
        return given
    mesh = init_device_mesh("cpu", (size,))
    return {
        name: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) if x.ndim else x for name, x in given.items()
    }


def _save(rank: int, size: int, store: str, folder: str, step: int) -> None:
    world = join(rank, size, store)
    saver = checkpoint.Saver(world)
    for in_background in (False, True):
        model = sharded(tensors(step), size)
        given = {"model": model, "optimizer": sharded(tensors(-step), size), "step": step + in_background}
        others = {"folder": Path(folder), "metadata": {"laplacian_heads": "2"}, "state": {}, "keep": 9}
        if in_background:
            saver.start(**given, **others)
            with torch.no_grad():  # the training goes on meanwhile
                for x in model.values():
                    (x.to_local() if isinstance(x, DTensor) else x).fill_(torch.nan)
        saved = saver.wait() if in_background else saver.save(**given, **others)
        assert saved == checkpoint.read(saved.path)
    saver.close()


def _load(rank: int, size: int, store: str, folder: str) -> None:
    join(rank, size, store)
    for step in (2, 3):
        found = checkpoint.read(Path(folder) / f"step-{step:06d}")
        for path, expected in ((found.weights, tensors(2)), (found.path / "optimizer", tensors(-2))):
            path = path if path.exists() else path.with_suffix(".safetensors")
            targets = sharded({name: torch.zeros_like(x) for name, x in expected.items()}, size)
            checkpoint.load_tensors(path, targets)
            for name, x in targets.items():
                complete = x.full_tensor() if isinstance(x, DTensor) else x
                assert torch.equal(complete, expected[name]), name


def run_ranks(target, size: int, *arguments) -> list[int]:
    with tempfile.TemporaryDirectory() as folder:
        children = [process(target, rank, size, f"{folder}/store", *arguments) for rank in range(size)]
        for child in children:
            child.start()
        return [exit_code(child, 120) for child in children]


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """Steps 2 and 3, by two processes; step 3 in the background, while the weights were overwritten."""
    folder = tmp_path_factory.mktemp("parts")
    assert run_ranks(_save, 2, str(folder), 2) == [0, 0]
    return folder


@pytest.mark.parametrize("size", [1, 3])
def test_parts_load_bitwise_into_any_number_of_processes(parts, size):
    assert run_ranks(_load, size, str(parts)) == [0] * size


def test_one_file_loads_bitwise_into_shards(tmp_path):
    assert run_ranks(_save, 1, str(tmp_path), 2) == [0]
    assert (tmp_path / "step-000002" / "model.safetensors").is_file()
    assert run_ranks(_load, 3, str(tmp_path)) == [0, 0, 0]


def _first_part(folder: Path) -> Path:
    return min((folder / "model").iterdir())


DAMAGES = {
    "a missing part": lambda folder: _first_part(folder).unlink(),
    "a part of another checkpoint": lambda folder: shutil.copy(
        _first_part(folder.with_name("step-000003")), _first_part(folder)
    ),
    "files outside of it": lambda folder: (folder / "state.json").write_text(
        (folder / "state.json").read_text().replace("model/shard-00001", "model/../../shard-00001")
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_named(parts, tmp_path, damage):
    shutil.copytree(parts, tmp_path / "run")
    folder = tmp_path / "run" / "step-000002"
    if damage == "a part of another checkpoint":  # whose weights differ
        assert run_ranks(_save, 2, str(tmp_path / "run"), 3) == [0, 0]
    DAMAGES[damage](folder)
    with pytest.raises(DataError, match=str(folder)) as error:
        checkpoint.read(folder)
    assert "state.json" in str(error.value) or "shard-0000" in str(error.value)


def _save_without_room(rank: int, size: int, store: str, folder: str) -> None:
    import resource
    import signal

    world = join(rank, size, store)
    saver = checkpoint.Saver(world)
    if rank == 1:  # as on a machine whose disk is full: files cannot grow any more
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    given = {"model": sharded(tensors(), size), "optimizer": sharded(tensors(), size)}
    others = {"folder": Path(folder), "step": 9, "metadata": {}, "state": {}, "keep": 9}
    said = r"could not save step 9 .*rank 1.*step-000003"
    with pytest.raises(LapError, match=said):
        saver.save(**given, **others)
    saver.start(**given, **others)
    with pytest.raises(LapError, match=said):
        saver.wait()
    saver.close()


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_loses_nothing(parts, tmp_path):
    shutil.copytree(parts, tmp_path / "run")
    assert run_ranks(_save_without_room, 2, str(tmp_path / "run")) == [0, 0]
    assert sorted(path.name for path in (tmp_path / "run").glob("*step*")) == ["step-000002", "step-000003"]
    assert checkpoint.read(tmp_path / "run" / "step-000003").step == 3


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.long)])
def test_a_run_resumes_bitwise_on_the_same_layout_and_within_rounding_on_others(
    tmp_path, shared_cache, monkeypatch, asynchronous
):
    """Two processes to two: the same bits. Otherwise sharded, to one, and from one to two: the same losses."""
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    recipe = tiny_recipe(
        write_text(tmp_path / "text.txt"),
        train={"steps": 24, "batch": 12, "micro_batch": 2},
        validation={"every": None, "tokens": 32, "prompts": []},
        checkpoint={"every": 4, "keep": 9},
    )
    (tmp_path / "run.yaml").write_text(recipe_to_yaml(recipe))

    def train(runs: Path, processes: int, shard: str = "gradients") -> list[dict]:
        change = ["--set", f"train.shard={shard}", "--set", f"checkpoint.asynchronous={asynchronous}"]
        command = ["train", str(tmp_path / "run.yaml"), "--runs-dir", str(runs), *change]
        result = lap(*command, cache=shared_cache, processes=processes)
        assert result.returncode == 0, result.stderr
        return [without_times(line) for line in read_metrics(runs / "run" / "metrics.jsonl")]

    expected = {1: train(tmp_path / "from1", 1), 2: train(tmp_path / "from2", 2)}
    for before, after, shard in ((2, 2, "gradients"), (2, 3, "weights"), (2, 1, "gradients"), (1, 2, "gradients")):
        runs = tmp_path / f"{before}to{after}"
        shutil.copytree(tmp_path / f"from{before}", runs)
        for later in range(8, 25, 4):
            shutil.rmtree(runs / "run" / "checkpoints" / f"step-{later:06d}")
        read_run(runs / "run").update(status="interrupted", step=4)
        found = train(runs, after, shard)
        if before == after:
            assert found == expected[before]
            ends = [json.loads((each / "run" / "run.json").read_text()) for each in (runs, tmp_path / "from2")]
            assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
        losses = [[line["loss"] for line in lines if "loss" in line] for lines in (found, expected[before])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
