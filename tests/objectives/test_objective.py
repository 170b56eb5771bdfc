"""The split of a global batch into micro-batches."""

import re

import pytest

from lapcli.objectives.objective import plan_batches
from lapcli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("batch", "micro_batch", "processes", "multiple"),
    [(254, 64, 1, 1), (2096, 64, 8, 1), (2 * 127 * 4, 60, 2, 4)],
)
def test_a_batch_without_a_nearby_split_is_refused_with_valid_sizes(batch, micro_batch, processes, multiple):
    with pytest.raises(UsageError, match=r"train\.batch") as refused:
        plan_batches(batch, micro_batch, processes, multiple)
    for named in (r"train\.micro_batch=(\d+)", r"or (\d+)\)"):
        size = int(re.search(named, str(refused.value))[1])
        assert plan_batches(batch, size, processes, multiple).micro_batch == size


@pytest.mark.parametrize("share", [1, 12, 38])
@pytest.mark.parametrize("micro_batch", [1, 5, 64])
def test_an_accepted_split_is_even_and_not_above_the_recipe(share, micro_batch):
    try:
        plan = plan_batches(share * 2, micro_batch, 2)
    except UsageError:
        fitting = [size for size in range(1, micro_batch + 1) if share % size == 0]
        assert share // max(fitting) >= 2 * (share / micro_batch)
        return
    assert plan.micro_batch * plan.accumulation == share
    assert plan.micro_batch <= micro_batch
    assert plan.accumulation < 2 * share / micro_batch + 2
