"""Rendered conversations in the cache: verified when they are read, whoever wrote them; long and empty ones counted."""

import json

import numpy as np
import pytest
from text_support import flip

from lapcli.data.chat.mixture import prepare_mixture
from lapcli.data.chat.rendered_rows import prepare_rows
from lapcli.recipe.chat import DataSet
from lapcli.runtime.errors import DataError

LONGEST = 40


def talk(*texts):
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.fixture
def chats(data_set):
    return data_set("chats", [talk("q" * (n % 5 + 1), "a" * (n % 9 + 1)) for n in range(200)])


def all_rows(rows):
    return [tuple(part.tolist() for part in rows.row(number)) for number in range(len(rows))]


def mixture_of(data, tokenizer, **changes):
    settings = {"seed": 0, "longest": LONGEST, "needs_targets": True, "skip_malformed": False, **changes}
    return prepare_mixture([data], tokenizer, **settings)


@pytest.mark.parametrize("name", ["tokens-00000.bin", "targets-00000.bin", "documents-00000.bin"])
def test_a_flipped_bit_is_named_and_the_next_start_builds_again(chats, tokenizer, lap_cache, name):
    expected = all_rows(prepare_rows(chats, tokenizer, LONGEST))
    (path,) = lap_cache.glob(f"chat/*/{name}")
    flip(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match=rf"{name} is damaged .* run the same command again"):
        all_rows(prepare_rows(chats, tokenizer, LONGEST))
    assert all_rows(prepare_rows(chats, tokenizer, LONGEST)) == expected


def test_conversations_that_are_cut_are_counted(data_set, tokenizer):
    """One byte a token, and five tokens around a question and its answer."""
    lengths = [10, 40 - 6, 40 - 5, 1000, 10]
    mixture = mixture_of(data_set("chats", [talk("q", "a" * length) for length in lengths]), tokenizer)
    assert sorted(mixture.lengths) == [16, 16, 40, 40, 40]
    assert mixture.cut == 2
    assert "5 rows; 2 (40.0%) are cut at 40 tokens" in mixture.describe()
    whole = mixture_of(data_set("short", [talk("q", "a")]), tokenizer)
    assert whole.cut == 0
    assert "cut" not in whole.describe()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (talk("", "a"), r"turn 1 \(user\) is empty"),
        (talk("q", " \n"), r"turn 2 \(assistant\) is empty"),
        (talk("q", "a", "\t", "b"), r"turn 3 \(user\) is empty"),
        ([{"role": "system", "content": "s"}, *talk("", "a")], "the content of a system or user message"),
        ([*talk("q"), {"role": "assistant", "content": []}], r"turn 2 \(assistant\) is empty"),
        (
            [*talk("q"), {"role": "assistant", "content": [{"type": "text", "text": ""}]}],
            r"turn 2 \(assistant\) is empty",
        ),
    ],
)
def test_empty_turns_are_malformed(data_set, tokenizer, row, reason):
    data = data_set("chats", [talk("q", "a"), row])
    with pytest.raises(DataError, match=f"1 of 2 conversations of chats are malformed:\n  chats.jsonl row 2: {reason}"):
        mixture_of(data, tokenizer)
    assert "1 malformed ones are left out" in mixture_of(data, tokenizer, skip_malformed=True).describe()


def test_empty_answers_of_benchmark_rows_are_malformed(data_set, tokenizer):
    data = data_set("sums", [{"question": "1+1?", "answer": "2"}, {"question": "?", "answer": ""}])
    with pytest.raises(DataError, match=r"row 2: turn 2 \(assistant\) is empty"):
        mixture_of(data.model_copy(update={"format": "gsm8k"}), tokenizer)


def test_wide_text_is_refused_and_a_file_under_two_names_read_once(tmp_path, tokenizer):
    (tmp_path / "q.csv").write_bytes("which?,this,that,A\n".encode("utf-16le"))
    (tmp_path / "words.txt").write_bytes("word\nother\n".encode("utf-16le"))
    choices = DataSet(name="q", format="multiple_choice", source=str(tmp_path / "q.csv"))
    words = DataSet(name="w", format="simple_spelling", source=str(tmp_path / "words.txt"), rows=3)
    for data, name in ((choices, "q.csv"), (words, "words.txt")):
        with pytest.raises(DataError, match=name):
            prepare_rows(data, tokenizer, LONGEST)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.jsonl").write_text(json.dumps(talk("q", "a")) + "\n")
    (tmp_path / "folder" / "b.jsonl").symlink_to("a.jsonl")
    linked = DataSet(name="x", format="conversations", source=str(tmp_path / "folder"))
    assert len(prepare_rows(linked, tokenizer, LONGEST)) == 1


def test_target_counts_are_those_of_the_rows(chats, tokenizer):
    rows = prepare_rows(chats, tokenizer, LONGEST)
    assert rows.target_counts.tolist() == [int(np.sum(rows.row(number)[1])) for number in range(len(rows))]
