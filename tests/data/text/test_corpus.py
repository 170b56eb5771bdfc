import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text.corpus import document_order, held_out, split_document
from lapcli.runtime.errors import DataError


@given(count=st.integers(2, 500), fraction=st.floats(0.001, 0.999), seed=st.none() | st.integers(0, 2**63 - 1))
def test_at_least_one_document_on_either_side(count, fraction, seed):
    held = held_out(count, fraction, seed)
    assert held.shape == (count,)
    assert 1 <= held.sum() <= count - 1
    assert abs(held.sum() - count * fraction) <= 1


def test_a_source_in_random_order_holds_out_its_end():
    assert held_out(10, 0.2, None).tolist() == [False] * 8 + [True] * 2


def test_the_seed_decides_which():
    assert (held_out(1000, 0.1, 0) == held_out(1000, 0.1, 0)).all()
    assert (held_out(1000, 0.1, 0) != held_out(1000, 0.1, 1)).any()
    assert sorted(document_order(100, 0, "train")) == list(range(100))
    assert document_order(100, 0, "train").tolist() != document_order(100, 0, "validation").tolist()


@settings(max_examples=300)
@given(text=st.text(st.sampled_from("ab \n"), min_size=2), fraction=st.floats(0.01, 0.99))
def test_a_cut_loses_and_repeats_nothing(text, fraction):
    train, held = split_document(text, fraction)
    assert train + held == text
    assert train
    assert held


def test_the_cut_is_after_a_newline_near_the_share():
    text = "a line of text\n" * 100
    train, held = split_document(text, 0.05)
    assert len(held) == 75
    assert train.endswith("\n")
    assert split_document("word " * 100, 0.1)[0].endswith(" ")
    assert split_document("a\n" + "x" * 98, 0.1) == ("a\n" + "x" * 88, "x" * 10), "a newline far away is not taken"


def test_one_character_cannot_be_cut():
    with pytest.raises(DataError, match="single character"):
        split_document("a", 0.5)
