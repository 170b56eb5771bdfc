"""A report's table as text, Markdown and LaTeX, from values that hold the marks of every form."""

import pytest

from lapcli.report.forms import Entry, Table, to_text


@pytest.mark.parametrize("width", [60, 10_000])
def test_text_fits_the_terminal_with_every_word_whole(width):
    note = "the runs differ in schedule.warmup_epochs and data-augmentation, " * 3
    table = to_text(Table("a title " * 12, ["row", "score"], [[Entry("0"), Entry("1")]], [note]), width)
    assert max(map(len, table.splitlines())) <= width
    assert set(note.split()) <= set(table.split())
