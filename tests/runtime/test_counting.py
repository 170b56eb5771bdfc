"""Counts of small operations, checked by hand."""

from typing import Any

import pytest
import torch
from counting_support import HostWaits

CPU, META = torch.device("cpu"), torch.device("meta")

WAITS: dict[str, Any] = {
    "a number": lambda x: x.sum().item(),
    "a float": lambda x: float(x[0, 0]),
    "a truth": lambda x: bool((x > 0).any()),
    "a list": lambda x: x.sum(1).tolist(),
    "a boolean index": lambda x: x[x > 0],
    "a boolean assignment": lambda x: x.index_put((x > 0,), x.new_ones(())),
    "places": lambda x: x.nonzero(),
    "different values": lambda x: x.argmax(1).unique(),
}
MOVES: dict[str, Any] = {
    "to the host": lambda x: x.cpu(),
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "numbers of the host": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a tensor of the host": lambda x: torch.ones(3).to(x.device),
}
FREE: dict[str, Any] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(1).sum(),
    "an index": lambda x: x[x.argmax(1)],
    "a mask": lambda x: x.masked_fill(x > 0, 0.0),
    "a constant": lambda x: x.new_full((2, 3), 1.0) + torch.arange(3, device=x.device),
    "an asynchronous copy": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "numbers on the host": lambda x: torch.tensor([1.0, 2.0]),
}


def waits_of(operation: Any, device: torch.device) -> int:
    with HostWaits(device) as waits:
        try:
            operation(torch.ones(3, 4, device=device))
        except (RuntimeError, NotImplementedError):
            assert device == META  # which has no sizes that depend on values
    return len(waits)


@pytest.mark.parametrize("name", WAITS)
def test_syncs_are_counted_on_both_devices(name: str) -> None:
    assert waits_of(WAITS[name], CPU) >= 1
    assert waits_of(WAITS[name], META) >= 1


@pytest.mark.parametrize("name", MOVES)
def test_copies_between_host_and_device_are_syncs(name: str) -> None:
    assert waits_of(MOVES[name], META) == 1


@pytest.mark.parametrize("name", FREE)
def test_other_operations_do_not_sync(name: str) -> None:
    assert waits_of(FREE[name], CPU) == waits_of(FREE[name], META) == 0
