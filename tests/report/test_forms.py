"""A report's table as text, Markdown and LaTeX, from values that hold the marks of every form."""

import pytest

from lapcli.report.forms import Entry, Table, to_latex, to_markdown, to_text

ODD = "a|b & 5% _x_ <i>\\{}"
TABLE = Table(
    "title",
    ["row", "score"],
    [[Entry(ODD), Entry("1.00 ± 0.50", " (3)", "best", True)], [Entry("0"), Entry("-", is_number=True)]],
    ["a note"],
)


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


@pytest.mark.parametrize("width", [60, 80, 10_000])
def test_text_fits_the_terminal_with_every_word_whole(width):
    note = "the runs differ in schedule.warmup_epochs and data-augmentation, " * 3
    table = to_text(Table("a title " * 12, ["row", "score"], [[Entry("0"), Entry("1")]], [note]), width)
    assert max(map(len, table.splitlines())) <= width
    assert set(note.split()) <= set(table.split())
