"""A report's table as text, Markdown and LaTeX, from values that hold the marks of every form."""

import pytest

from lapcli.report.forms import Entry, Table, to_latex, to_markdown, to_text

TABLE = Table(
    "title",
    ["row", "score"],
    [[Entry("a|b & 5% _x_"), Entry("1.00 ± 0.50", " (3)", "best", True)], [Entry("0"), Entry("-", is_number=True)]],
    ["a note"],
)


def test_every_form_has_marks_gaps_and_notes():
    text, markdown, latex = to_text(TABLE), to_markdown(TABLE), to_latex(TABLE)
    assert "1.00 ± 0.50 (3) *" in text
    assert r"$\mathbf{1.00 \pm 0.50}$ (3)" in latex
    assert "| **1.00 ± 0.50 (3)** |" in markdown
    assert r"| a\|b &amp; 5% \_x\_ |" in markdown
    assert "0 & --" in latex
    assert r"5\% \_x\_" in latex
    assert all("a note" in form for form in (text, markdown, latex))


@pytest.mark.parametrize("width", [60, 10_000])
def test_text_fits_the_terminal_with_every_word_whole(width):
    note = "the runs differ in schedule.warmup_epochs and data-augmentation, " * 3
    table = to_text(Table("a title " * 12, ["row", "score"], [[Entry("0"), Entry("1")]], [note]), width)
    assert max(map(len, table.splitlines())) <= width
    assert set(note.split()) <= set(table.split())
