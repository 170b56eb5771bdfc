"""Questions packed into rows against a separate forward pass for every choice."""

import pytest
import torch
from counting_support import HostWaits
from harness_support import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.evaluation.likelihood import Question, score
from lapcli.models.gpt import GPT
from lapcli.runtime.errors import LapError

VOCAB = 50
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6).map(tuple)
question = st.builds(Question, tokens, st.lists(tokens, min_size=1, max_size=5).map(tuple))


@torch.no_grad()
def one_by_one(model: GPT, question: Question) -> list[tuple[float, bool]]:
    """A forward pass per context and continuation, with a float64 log-softmax over the vocabulary."""
    found = []
    for continuation in question.continuations:
        ids = [*question.context, *continuation]
        logits = model(torch.tensor([ids]))[0].double().log_softmax(-1)[len(question.context) - 1 : -1]
        chosen = logits[range(len(continuation)), list(continuation)]
        found.append((float(chosen.sum()), logits.argmax(-1).tolist() == list(continuation)))
    return found


@pytest.mark.parametrize("laplacian_heads", [0, 1, 2])
@settings(max_examples=15, deadline=None)
@given(questions=st.lists(question, min_size=1, max_size=5), batch=st.sampled_from([1, 3, 8]))
def test_packed_questions_match_separate_forwards(laplacian_heads, questions, batch):
    model = tiny_model(VOCAB, laplacian_heads=laplacian_heads)
    found = dict(score(model, questions, batch))
    assert sorted(found) == list(range(len(questions)))
    for number, each in enumerate(questions):
        expected = one_by_one(model, each)
        assert [p.logprob for p in found[number]] == pytest.approx([p for p, _ in expected], abs=1e-4)
        assert [p.is_greedy for p in found[number]] == [greedy for _, greedy in expected]


def test_no_device_sync_per_position() -> None:
    """The number of syncs is the same for twelve times as many."""
    model, waits = tiny_model(VOCAB), []
    for times in (1, 12):
        questions = [Question((1, 2, 3), ((4, 5 + n % 7), (6,))) for n in range(times)]
        with HostWaits(torch.device("cpu")) as counted:
            list(score(model, questions, batch=12))
        waits.append(len(counted))
    assert waits[0] == waits[1]


@pytest.mark.parametrize("continuations", [((1,), (2,)), ((1, 2), (3, 4, 5))])
def test_non_finite_weights_are_an_error(continuations):
    model = tiny_model(VOCAB)
    with torch.no_grad():
        model.blocks[1].mlp.up.weight[0, 0] = float("nan")
    with pytest.raises(LapError, match="not finite"):
        list(score(model, [Question((1, 2), continuations)], 4))
