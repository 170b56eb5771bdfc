"""Causes of GPU waiting time, counted without a GPU: memory traffic of the losses, and host syncs in a
step.

Bytes per logit (an element of tokens x vocabulary, or of samples x prototypes), without matmuls: for eager code each
operation's inputs and results, for compiled code Inductor's own count for the CPU, which stands for Triton's.
Syncs are counted on the meta device with the policy of a CUDA GPU, in the second step of shipped recipes.
`python benchmarks/traffic.py [bytes|waits]` prints one part.
"""

import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.objectives import objective_of
from lapcli.objectives.dino_losses import dino_loss, sinkhorn_targets, target_cross_entropy
from lapcli.recipe import find_recipe, load_recipe
from lapcli.runs import Run
from lapcli.runtime.devices import ComputePolicy
from lapcli.runtime.progress import LogConsole
from lapcli.runtime.ranks import World
from lapcli.training.loop import Loop

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from counting_support import HostWaits, compiled_bytes
from traffic_support import Traffic

ROWS, COLUMNS, WIDTH = 640, 4096, 8
EAGER, COMPILED = (ComputePolicy("cuda", bf16=True, compiles=compiles) for compiles in (False, True))
META = torch.device("meta")


def language_model(policy: ComputePolicy) -> None:
    """bf16 states, float32 weights of the head, as in the GPT on a GPU."""
    x_ND, weight_VD = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_(), torch.randn(COLUMNS, WIDTH).requires_grad_()
    targets_N = torch.randint(COLUMNS, (ROWS,))
    softcapped_cross_entropy(x_ND, weight_VD, targets_N, 15.0, compiled=policy.compiles, policy=policy).backward()


def sinkhorn(policy: ComputePolicy, iterations: int = 3) -> None:
    logits_NK = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    sinkhorn_targets(logits_NK, 0.05, iterations, policy)


def ibot(policy: ComputePolicy) -> None:
    x_ND, prototypes_KD = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_(), torch.randn(COLUMNS, WIDTH)
    targets_NK, weights_N = torch.empty(ROWS, COLUMNS), torch.full((ROWS,), 1 / ROWS)
    prototypes_KD.requires_grad_()
    target_cross_entropy(x_ND, prototypes_KD, targets_NK, weights_N, 0.1, policy=policy)[0].backward()


def dino(policy: ComputePolicy) -> None:
    """Two global and eight local crops."""
    x_ND, prototypes_KD = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_(), torch.randn(COLUMNS, WIDTH)
    targets_MK = torch.empty(ROWS // 5, COLUMNS)
    dino_loss(x_ND, prototypes_KD.requires_grad_(), targets_MK, ROWS // 10, 0.1, policy)[0].backward()


LOSSES: dict[str, Callable[[ComputePolicy], None]] = {
    "language model": language_model,
    "Sinkhorn-Knopp": sinkhorn,
    "iBOT cross entropy": ibot,
    "DINO cross entropy": dino,
}


def bytes_a_logit(loss: Callable[[ComputePolicy], None]) -> tuple[float, float]:
    """Counts of eager and compiled code."""
    with Traffic() as traffic:
        loss(EAGER)
    if loss is sinkhorn:  # each of its kernels is counted once, those between two sums over processes run twice
        one, two = (compiled_bytes(lambda n=n: sinkhorn(COMPILED, n)) for n in (1, 2))  # type: ignore[misc]
        compiled = one + 2 * (two - one)
    else:
        compiled = compiled_bytes(lambda: loss(COMPILED))
    return traffic.bytes / (ROWS * COLUMNS), compiled / (ROWS * COLUMNS)


def print_bytes() -> None:
    print(f"bytes a logit, bf16, {ROWS} x {COLUMNS:,}")
    print(f"{'':<20}{'eager':>8}{'compiled':>10}")
    for name, loss in LOSSES.items():
        eager, compiled = bytes_a_logit(loss)
        print(f"{name:<20}{eager:>8.1f}{compiled:>10.1f}")


def waits_of_a_step(recipe_name: str, folder: Path) -> tuple[int, int]:
    """Micro-steps of a step and its syncs. Autocast needs the GPU itself, so this is float32."""
    recipe = load_recipe(find_recipe(Path(recipe_name)), ["train.device=cpu", "train.compile=false"])
    (folder / recipe_name).mkdir()
    world, run = World(0, 1, META), Run(folder / recipe_name, recipe, {})
    objective = objective_of(recipe)(recipe)
    objective.prepare(world, run, None)
    objective.build(META)
    loop = Loop(objective, recipe, run, world, LogConsole(io.StringIO()))
    for step in range(2):
        with HostWaits(META) as waits:
            loop._update(step)
    return objective.batches.accumulation, len(waits)


def print_waits() -> None:
    print("host syncs in a step")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in ("quickstart", "vit_digits", "dino_quickstart"):
            micro_steps, waits = waits_of_a_step(recipe, Path(folder))
            print(f"{recipe:<20}{waits:>4} ({micro_steps} micro-step{'s' if micro_steps > 1 else ''})")


PARTS = {"bytes": print_bytes, "waits": print_waits}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
