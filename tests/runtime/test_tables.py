"""Tables for people and for programs, from values that hold the marks of every form."""

import csv
import io

from lapcli.runtime.tables import Entry, Table, aligned, to_csv, to_latex, to_markdown, to_text

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
