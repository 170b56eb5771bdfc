"""Tables for people and for programs, from values that hold the marks of every form."""

import csv
import io

import pytest

from lapcli.runtime.tables import (
    Entry,
    Table,
    aligned,
    fitted,
    to_csv,
    to_latex,
    to_markdown,
    to_text,
    wrapped_message,
)

ODD = "a|b & 5% _x_ <i>\\{}"
TABLE = Table(
    "title",
    ["row", "score"],
    [[Entry(ODD), Entry("1.00 ± 0.50", " (3)", "best", True)], [Entry("0"), Entry("-", is_number=True)]],
    ["a note"],
)


def test_columns_begin_or_end_at_the_same_place():
    lines = aligned([["name", "n"], ["a", "10"], ["longer name", "5"]], right=[1])
    assert [line.rstrip()[-1] for line in lines] == ["n", "0", "5"]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["a", "10"]


def test_csv_reads_back_as_it_was_and_nothing_is_an_empty_field():
    rows = list(csv.reader(io.StringIO(to_csv(["a", "b"], [[ODD, None], ['"quoted"\n', 0]]))))
    assert rows == [["a", "b"], [ODD, ""], ['"quoted"\n', "0"]]


def test_every_form_has_marks_gaps_and_notes():
    text, markdown, latex = to_text(TABLE), to_markdown(TABLE), to_latex(TABLE)
    assert "1.00 ± 0.50 (3) *" in text
    assert "* best, + second." in text
    assert "| **1.00 ± 0.50 (3)** |" in markdown
    assert r"$\mathbf{1.00 \pm 0.50}$ (3)" in latex
    assert "0 & --" in latex
    assert all("a note" in form for form in (text, markdown, latex))


def test_text_is_no_markup():
    (row,) = [line for line in to_markdown(TABLE).splitlines() if line.startswith("| a")]
    assert row.count("|") - row.count("\\|") == 3  # two columns
    assert "<i>" not in row
    (row,) = [line for line in to_latex(TABLE).splitlines() if "1.00" in line]
    assert row.count("&") - row.count(r"\&") == 1
    assert r"5\% \_x\_" in row


ROWS = [
    ["run", "kind", "score of the validation", "why"],
    ["vit_digits_2L_seed0", "classification", "0.9123 ± 0.0042 (3)", "the disk of the machine was full at that moment"],
    ["3", "language model", "", "-"],
]


@pytest.mark.parametrize("width", [60, 80, 120, 10_000])
def test_text_fits_the_terminal_with_every_word_whole(width):
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
    note = "the runs differ in schedule.warmup_epochs and data-augmentation, " * 3
    table = to_text(Table("a title " * 12, ["row", "score"], [[Entry("0"), Entry("1")]], [note]), width)
    assert max(map(len, table.splitlines())) <= width
    assert set(note.split()) <= set(table.split())


def test_a_message_keeps_its_lines_and_their_beginnings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    message = "lap: Found 2 errors:\n  recipe.yaml:3: model.haeds is not a key; did you mean model.heads?"
    lines = wrapped_message(message).splitlines()
    assert lines[0] == "lap: Found 2 errors:"
    assert len(lines) == 3
    assert max(map(len, lines)) <= 40
    assert [line[: len(line) - len(line.lstrip())] for line in lines[1:]] == ["  ", "    "]
    assert " ".join(wrapped_message(message).split()) == " ".join(message.split())
