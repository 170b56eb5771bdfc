"""Memory traffic of the losses, counted by benchmarks/traffic.py. The limits may only be lowered."""

import runpy
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # each is compiled

BENCHMARK: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "traffic.py"))
#: Bytes per logit of compiled code.
MOST_BYTES = {
    "language model": 6.1,  # two reads and a write of bf16 logits
    "Sinkhorn-Knopp": 16.2,  # five reads, and one that writes float32
    "iBOT cross entropy": 8.1,  # a read and a write, and a read of float32 targets
    "DINO cross entropy": 4.9,  # the same, with a fifth as many targets
}


@pytest.mark.parametrize("loss", MOST_BYTES)
def test_compiled_losses_move_few_bytes(loss: str) -> None:
    eager, compiled = BENCHMARK["bytes_a_logit"](BENCHMARK["LOSSES"][loss])
    assert 0 < compiled <= MOST_BYTES[loss] < eager
