"""Several ranks resume from the checkpoint that rank 0 chose, or not at all; bitwise equal."""

import shutil

import pytest
from support import (
    LOG,
    edit_checkpoint,
    exit_code,
    ranks,
    start_child,
    start_lap,
    tiny_recipe,
    train_here,
    write_text,
)

from lapcli.recipe import recipe_to_yaml
from lapcli.training.metrics import read_metrics

STEPS = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory, shared_cache):
    """A recipe, and the folder `runs` with a run of it that was interrupted after four of six steps."""
    folder = tmp_path_factory.mktemp("ranks")
    recipe = tiny_recipe(
        write_text(folder / "text.txt"),
        train={"steps": STEPS, "batch": 12, "micro_batch": 2},
        validation={"every": None, "tokens": 32, "prompts": []},
        checkpoint={"every": 2, "keep": 3},
    )
    (folder / "run.yaml").write_text(recipe_to_yaml(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        run = train_here(recipe, folder / "runs")
    cut(run)
    return folder


def cut(run):
    shutil.rmtree(run.checkpoints / f"step-{STEPS:06d}")
    run.update(status="interrupted", step=STEPS - 2)


def resumed_by_two(place, folder, shared_cache):
    """The results of rank 0, which sees the runs in `folder/0`, and of rank 1, which sees those in `folder/1`."""
    command = ["train", str(place / "run.yaml"), "--runs-dir"]
    started = [
        start_lap(*command, str(folder / str(number)), cache=shared_cache, environment=rank)
        for number, rank in enumerate(ranks(2))
    ]
    return [command.result() for command in started]


def views(place, folder):
    """Makes a copy of the runs for each rank; returns their checkpoint folders."""
    for rank in "01":
        shutil.copytree(place / "runs", folder / rank)
    return [folder / rank / "run" / "checkpoints" for rank in "01"]


def damage(path):
    (path / "step-000004" / "model.safetensors").write_bytes(b"")


def other_moments(path):
    edit_checkpoint(path / "step-000004", "optimizer.safetensors", lambda state: state["exp_avg/head.weight"].zero_())


def no_run(path):
    shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damage, "model.safetensors"),
        (other_moments, "step-000004"),
        (no_run, "run.json"),
    ],
)
def test_ranks_with_different_checkpoints_refuse_to_resume(place, tmp_path, shared_cache, change, said):
    change(views(place, tmp_path)[1])
    first, second = resumed_by_two(place, tmp_path, shared_cache)
    assert (first.returncode, second.returncode) == (2, 2), (first.stderr, second.stderr)
    assert "lap: rank 1 on " in first.stderr
    assert said in first.stderr
    assert "Traceback" not in first.stderr + second.stderr
    assert "lap:" not in second.stderr  # rank 0 has said it
    assert not (tmp_path / "0" / "run" / "checkpoints" / f"step-{STEPS:06d}").exists()


def test_ranks_that_write_to_different_folders_are_refused(place, tmp_path, shared_cache):
    """As on machines without a shared file system: rank 0 would lack the files of the others."""
    views(place, tmp_path)
    first, second = resumed_by_two(place, tmp_path, shared_cache)
    assert (first.returncode, second.returncode) == (1, 1), (first.stderr, second.stderr)
    assert "--runs-dir" in first.stderr
    assert not (tmp_path / "0" / "run" / "checkpoints" / f"step-{STEPS:06d}").exists()


def test_parameters_without_a_gradient_do_not_prevent_averaging_the_others(tmp_path, shared_cache):
    """Two processes match one: the loss does not depend on queries and keys of such heads."""
    recipe = tiny_recipe(
        write_text(tmp_path / "text.txt"),
        model={"laplacian_heads": 0, "operators": {"value-only": "all"}},
        train={"steps": 4, "batch": 8, "micro_batch": 2},
        validation={"every": None, "tokens": 32, "prompts": []},
        checkpoint={"every": 1, "keep": 4},
    )
    for count in (1, 2):
        children = [start_child(recipe, tmp_path / str(count), shared_cache, environment=rank) for rank in ranks(count)]
        assert [exit_code(child) for child in children] == [0] * count, (tmp_path / str(count) / LOG).read_text()
    one, two = (
        [line["loss"] for line in read_metrics(tmp_path / n / "run" / "metrics.jsonl") if "loss" in line] for n in "12"
    )
    assert two == pytest.approx(one, rel=1e-5)
    assert len(one) == 4
