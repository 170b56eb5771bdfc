import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text.tokens import TokenBatches
from lapcli.data.token_store import PartWriter, TokenStore, TokenStream
from lapcli.runtime.errors import DataError


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Tokens equal to their positions, in parts of 33."""
    parts = []
    for first in range(0, 104, 33):
        parts.append(tmp_path_factory.mktemp("part"))
        writer = PartWriter(parts[-1], 1000)
        writer.append(range(first, min(first + 33, 104)))
        writer.end()
        writer.close()
    return TokenStream(TokenStore(parts), np.arange(len(parts)))


def batches(stream, **keys):
    return TokenBatches(stream, **{"context": 10, "batch": 4, "seed": 0, "shuffled": True, **keys})


def test_positions_worked_by_hand(stream):
    here = batches(stream)
    assert here.sequences_per_epoch == 10
    inputs, targets = here.sequences(0, 0, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(start, start + 10)) for start in (0, 10, 20, 30)]
    assert targets.tolist() == [list(range(start + 1, start + 11)) for start in (0, 10, 20, 30)]
    # Step 2 holds sequences 8 and 9 of the first epoch and 0 and 1 of the second.
    assert here.sequences(2, 0, 4)[0][:, 0].tolist() == [80, 90, 0, 10]
    assert here.sequences(2, 1, 2)[0][:, 0].tolist() == [90, 0]
    assert here.identity(2) == "sequences 8 of epoch 0 to 1 of epoch 1 (10 an epoch, seed 0)"


@pytest.mark.parametrize("shuffled", [True, False])
def test_every_token_of_an_epoch_is_a_target_once(stream, shuffled):
    here = batches(stream, shuffled=shuffled, batch=5)
    for epoch in range(3):
        steps = [here.sequences(step, 0, 5) for step in (2 * epoch, 2 * epoch + 1)]
        assert sorted(torch.cat([targets for _, targets in steps]).flatten().tolist()) == list(range(1, 101))
        assert sorted(torch.cat([inputs for inputs, _ in steps]).flatten().tolist()) == list(range(100))


@settings(deadline=None, max_examples=50)
@given(
    step=st.integers(0, 50), ranks=st.sampled_from([1, 2, 3, 4, 6, 12]), seed=st.integers(0, 2**31), order=st.booleans()
)
def test_ranks_share_one_global_batch(stream, step, ranks, seed, order):
    whole = batches(stream, batch=12, seed=seed, shuffled=order).sequences(step, 0, 12)
    share = 12 // ranks
    parts = [
        batches(stream, batch=12, seed=seed, shuffled=order).sequences(step, rank * share, share)
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])
    assert torch.equal(torch.cat([targets for _, targets in parts]), whole[1])


def test_a_stream_shorter_than_a_sequence_is_refused_with_a_remedy(stream):
    with pytest.raises(DataError, match=r"104 tokens.*model\.context"):
        batches(stream, context=104)
