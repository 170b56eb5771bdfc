"""Text that fits the terminal, and rows as CSV."""

import csv
import io

import pytest

from lapcli.runtime.tables import fitted, to_csv, wrapped_message


def test_csv_round_trips_and_none_is_an_empty_field():
    rows = list(csv.reader(io.StringIO(to_csv(["a", "b"], [["a|b, %", None], ['"quoted"\n', 0]]))))
    assert rows == [["a", "b"], ["a|b, %", ""], ['"quoted"\n', "0"]]


ROWS = [
    ["run", "kind", "score of the validation", "why"],
    ["vit_digits_2L_seed0", "classification", "0.9123 ± 0.0042 (3)", "the disk of the machine was full at that moment"],
    ["3", "language model", "", "-"],
]


@pytest.mark.parametrize("width", [60, 80, 120, 10_000])
def test_text_fits_the_terminal_without_splitting_words(width):
    lines = fitted(ROWS, width=width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for row in ROWS[1:]:
        for cell in row:
            assert set(cell.split()) <= set(words)  # a word that was broken would be two others
    if width == 60:  # a list: the first column, then header and text in pairs
        assert lines[0] == "vit_digits_2L_seed0"
        assert "run 3" in lines
        assert any(line.strip().startswith("kind classification") for line in lines)


def test_a_message_keeps_its_lines_and_their_prefixes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    message = "lap: Found 2 errors:\n  recipe.yaml:3: model.haeds is not a key; did you mean model.heads?"
    lines = wrapped_message(message).splitlines()
    assert lines[0] == "lap: Found 2 errors:"
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40
    assert [line[: len(line) - len(line.lstrip())] for line in lines[1:]] == ["  ", "    "]
    assert " ".join(wrapped_message(message).split()) == " ".join(message.split())
