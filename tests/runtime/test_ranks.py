"""Ranks share the work of a validation or an evaluation."""

import pytest
import torch

from lapcli.runtime.ranks import World


@pytest.mark.parametrize(("count", "batch", "size"), [(10, 3, 2), (8, 2, 3), (1, 4, 3), (7, 7, 1), (0, 4, 2)])
def test_each_position_is_taken_once_and_ranks_have_equal_turns(count, batch, size):
    by_rank = [World(rank, size, torch.device("cpu")).shares(count, batch) for rank in range(size)]
    assert len({len(shares) for shares in by_rank}) == 1
    turns = [share for turn in zip(*by_rank, strict=True) for share in turn]
    assert all(len(share) <= batch for share in turns)
    assert [position for share in turns for position in share] == list(range(count))
