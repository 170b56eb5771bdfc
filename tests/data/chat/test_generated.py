"""The generated tasks: their answers are correct and the same on every machine."""

import random
import string

import pytest

from lapcli.data.chat.generated import simple_spelling, spelling_bee, words_of
from lapcli.generation.calculator import calculate
from lapcli.recipe.chat import DataSet
from lapcli.runtime.errors import DataError

WORDS = ["banana", "strawberry", "it", "zoo", "misspelling", "ten"]


def test_simple_spelling_is_correct():
    for number in range(50):
        question, answer = (turn.parts[0].text for turn in simple_spelling(WORDS, number))
        word, _, letters = answer.partition(":")
        assert question == f"Spell this word: {word}"
        assert word in WORDS
        assert letters.split(",") == list(word)


def test_spelling_bee_counts_are_correct():
    zero = 0
    for number in range(300):
        question, answer = spelling_bee(WORDS, number)
        by_hand, announced, call, output, end = answer.parts
        assert [part.kind for part in answer.parts] == ["text", "text", "python", "python_output", "text"]
        _, word, _, letter, _ = call.text.split("'")
        assert word in WORDS
        assert letter in string.ascii_lowercase
        count = sum(character == letter for character in word)
        assert call.text == f"'{word}'.count('{letter}')"
        assert calculate(call.text) == output.text == str(count)
        assert end.text.endswith(f"#### {count}")
        assert f"{word}:{','.join(word)}\n" in by_hand.text
        lines = by_hand.text.splitlines()
        for place, character in enumerate(word, start=1):
            (line,) = [line for line in lines if line.split(" ")[0] == f"{place}:{character}"]
            assert ("found" in line) == (character == letter)
        assert f"that makes {count}" in by_hand.text or count == 0
        assert word in question.parts[0].text
        assert announced.text
        zero += count == 0
    assert 5 < zero < 60  # a tenth of the letters is any of the alphabet


def test_draws_in_the_order_of_the_fact_sheet():
    """The first two draws: a word, then whether the letter occurs in it."""
    for number in range(20):
        draw = random.Random(number)
        word = draw.choice(WORDS)
        inside = draw.random() < 0.9
        letter = draw.choice(word) if inside else draw.choice(string.ascii_lowercase)
        assert spelling_bee(WORDS, number)[1].parts[2].text == f"'{word}'.count('{letter}')"


def words_in(path):
    return words_of(DataSet(name="words", format="simple_spelling", source=str(path), rows=1))


def test_words_of_a_file(tmp_path):
    (tmp_path / "words.txt").write_bytes(b"alpha\r\nbeta\r\n\r\ngamma")
    assert words_in(tmp_path / "words.txt") == ["alpha", "beta", "gamma"]
    (tmp_path / "none.txt").write_bytes(b"\n")
    for name in ("none.txt", "missing.txt"):
        with pytest.raises(DataError, match=name):
            words_in(tmp_path / name)
