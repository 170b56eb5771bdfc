"""Several processes that share gradients, optimizer state or weights make the same steps as one."""

import io
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from objectives_support import build
from support import exit_code, lap, process, tiny_recipe, train_here, write_text
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lapcli.objectives.objective import ParameterGroup, plan_batches
from lapcli.planning import plan_training
from lapcli.recipe import recipe_to_yaml
from lapcli.runs import Run
from lapcli.runtime import plugins
from lapcli.runtime.devices import Device
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.loop import Loop
from lapcli.training.optimizers import AdamW, Muon

STEPS, WIDTH = 3, 7  # a width that no number of processes divides


class SGD(AdamW):
    name = "sgd"

    def build(self, groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(g.parameters.values()), "lr": g.lr} for g in groups])

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class Toy:
    """Three blocks and a head in float64; the data of a step depend only on its number."""

    def __init__(self, world: World, batch: int, micro_batch: int) -> None:
        self.world, self.batches = world, plan_batches(batch, micro_batch, world.size)
        self.policy, self.steps, self.units_per_step, self.unit = SimpleNamespace(bf16=False), STEPS, batch, "rows"
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))})
        self.model["head"] = nn.Linear(WIDTH, 2, bias=False)
        self.model.double()

    def blocks(self) -> list[nn.Module]:
        return list(self.model["blocks"].children())

    shards = blocks

    def gathered_dtype(self, part: nn.Module) -> None:
        return None

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup("all", "sgd", 0.1, dict(self.model.named_parameters()))]

    def learning_rate_multiplier(self, step: int) -> float:
        return 1.0

    def batch(self, step: int, micro_step: int) -> torch.Tensor:
        rows = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        first = self.batches.first(micro_step, self.world.rank)
        return rows[first : first + self.batches.micro_batch]

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        # The head's weight is used outside its own forward, as in a chunked loss.
        hidden = self.model["blocks"](rows).tanh()
        return (hidden @ self.model["head"].weight.t()).square().sum(1).mean()

    def update_metrics(self) -> dict[str, torch.Tensor]:
        return {}

    def after_step(self, step: int) -> None:
        pass


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _join(rank: int, size: int, folder: str) -> World:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    return World(rank, size, torch.device("cpu"))


def _toy_steps(rank: int, size: int, folder: str) -> None:
    world, found = _join(rank, size, folder), {}
    plugins._added["optimizer"] = {"sgd": (SGD(), "test")}
    recipe = tiny_recipe(Path(folder) / "none.txt", optimizer={"clip": 0.5})
    for shard in ("gradients", "weights"):
        for micro_batch in (12 // size, 12 // size // 2):  # without and with accumulation
            train = recipe.train.model_copy(update={"shard": shard})
            one = recipe.model_copy(update={"train": train})
            toy = Toy(world, 12, micro_batch)
            loop = Loop(toy, one, Run(Path(folder), one, {}), world, LogConsole(io.StringIO()))  # type: ignore
            lines = [loop._update(step) for step in range(STEPS)]
            weights = [_whole(p).flatten().tolist() for p in toy.model.parameters()]
            found[f"{shard} {12 // size // micro_batch}"] = [[(x["loss"], x["gradient_norm"]) for x in lines], weights]
    if rank == 0:
        Path(folder, f"toy{size}.json").write_text(json.dumps(found))


def run_in(sizes: tuple[int, ...], function: Any, folder: Path) -> None:
    children = [process(function, rank, size, str(folder)) for size in sizes for rank in range(size)]
    for child in children:
        child.start()
    assert [exit_code(child, 300) for child in children] == [0] * len(children)


def test_sgd_in_float64_on_one_two_and_three_processes(tmp_path):
    """Clipped steps, with and without accumulation, both ways of sharding; one process is the oracle."""
    run_in((1, 2, 3), _toy_steps, tmp_path)
    one, *others = (json.loads((tmp_path / f"toy{size}.json").read_text()) for size in (1, 2, 3))
    reference = torch.tensor([x for each in one["gradients 1"][1] for x in each], dtype=torch.float64)
    for found in (one, *others):
        for lines, weights in found.values():
            got = torch.tensor([x for each in weights for x in each], dtype=torch.float64)
            torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)
            # The log is float32.
            torch.testing.assert_close(torch.tensor(lines), torch.tensor(one["gradients 1"][0]), rtol=1e-6, atol=0)


SHAPES = [(5, 12), (12, 5), (5, 12), (5, 12), (1, 9), (8, 8)]


def _muon_steps(rank: int, size: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    _join(rank, size, folder)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(3)]
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None

    def place(x: torch.Tensor) -> torch.Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    params = [nn.Parameter(place(x.clone())) for x in whole]
    muon = Muon(params, lr=0.1)
    for each in gradients:
        for p, gradient in zip(params, each, strict=True):
            p.grad = place(gradient)
        muon.step()
    states = [_whole(muon.state[p]["momentum"]) for p in params]
    if rank == 0:
        torch.save([[_whole(p).detach() for p in params], states], Path(folder, f"muon{size}.pt"))
    else:
        [_whole(p) for p in params]


def test_each_matrix_is_orthogonalised_by_its_owner(tmp_path):
    """Rows that do not divide evenly, and ranks without rows or without a matrix."""
    run_in((1, 2, 3), _muon_steps, tmp_path)
    one, *others = (torch.load(tmp_path / f"muon{size}.pt") for size in (1, 2, 3))
    for found in others:
        for got, expected in zip(chain(*found), chain(*one), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("name", ["language_model", "self_supervised"])
def test_recomputed_blocks_are_bitwise_equal(name, tmp_path):
    """The loss and the weights after two updates, with drop path."""
    found = []
    for recompute in ("none", "blocks"):
        objective = build(name, tmp_path, recompute=recompute, batch=16, micro_batch=8)
        run = Run(tmp_path / "run", objective.recipe, {})
        world = World(0, 1, torch.device("cpu"))
        loop = Loop(objective, objective.recipe, run, world, LogConsole(io.StringIO()))
        losses = [loop._update(step)["loss"] for step in range(2)]
        found.append((losses, [p.detach().clone() for p in objective.model.parameters()]))
    (losses, weights), (again, weights_again) = found
    assert losses == again
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))


class Sent(TorchDispatchMode):
    """Counts the bytes that a process sends in tensor collectives."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        if name == "c10d::_allgather_base_":
            self.bytes += args[1].nbytes * (self.size - 1)
        elif name in ("c10d::_reduce_scatter_base_", "c10d::alltoall_base_"):
            self.bytes += args[1].nbytes * (self.size - 1) // self.size
        return func(*args, **(kwargs or {}))


def _bytes_held(rank: int, size: int, folder: str) -> None:
    world = _join(rank, size, folder)
    model = {"layers": 2, "width": 256, "heads": 4, "laplacian_heads": 2}
    recipe = tiny_recipe(Path(folder) / "text.txt", model=model, train={"batch": 12, "micro_batch": 2})
    from lapcli.data.text.tokens import prepare_text
    from lapcli.objectives.language_model import LanguageModel

    objective = LanguageModel(recipe)
    objective.use(prepare_text(recipe.data, recipe.tokenizer), world)
    objective.build(world.device)
    loop = Loop(objective, recipe, Run(Path(folder), recipe, {}), world, LogConsole(io.StringIO()))
    with Sent(size) as sent:
        loop._update(0)
    Path(folder, f"sent{size}").write_text(str(sent.bytes))
    tensors = [*objective.model.parameters(), *loop.optimizers.state().values()]
    held = sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
    if rank == 0:
        Path(folder, f"held{size}").write_text(str(held))


def test_each_of_two_processes_holds_half_of_the_weights_and_moments(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    recipe = tiny_recipe(write_text(tmp_path / "text.txt"))
    train_here(recipe, tmp_path / "runs")  # the tokens, once
    run_in((1, 2), _bytes_held, tmp_path)
    one, two = (int((tmp_path / f"held{size}").read_text()) for size in (1, 2))
    assert two <= 0.6 * one
    # The planned traffic of a step, except for rows that do not divide; three micro-steps gather the weights once.
    model = {"layers": 2, "width": 256, "heads": 4, "laplacian_heads": 2}
    planned = tiny_recipe(tmp_path / "text.txt", model=model, train={"batch": 12, "micro_batch": 2})
    expected = plan_training(planned, 2, Device("CPU", "cpu", None)).communication_bytes
    assert int((tmp_path / "sent2").read_text()) == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["gradients", "weights"])
def test_idle_ranks_in_validation_and_rank_0_sampling_do_not_deadlock(shard, tmp_path, shared_cache):
    """One validation sequence for three ranks, and prompts that only rank 0 continues with the sharded model."""
    recipe = tiny_recipe(
        write_text(tmp_path / "text.txt"),
        train={"steps": 2, "batch": 12, "micro_batch": 2, "shard": shard},
        validation={"every": 1, "tokens": 32, "prompts": ["the cat", "a dog"], "sample_tokens": 3},
    )
    (tmp_path / "run.yaml").write_text(recipe_to_yaml(recipe))
    found = []
    for processes in (1, 3):
        runs = tmp_path / str(processes)
        result = lap(
            "train", str(tmp_path / "run.yaml"), "--runs-dir", str(runs), cache=shared_cache, processes=processes
        )
        assert result.returncode == 0, result.stderr
        summary = json.loads((runs / "run" / "summary.json").read_text())
        found.append((summary["end"]["validation_loss"], [sample["continuation"] for sample in summary["samples"]]))
    (one, texts), (three, texts_again) = found
    assert three == pytest.approx(one, rel=1e-5)
    assert texts == texts_again
