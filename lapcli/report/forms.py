"""The forms in which a report's table leaves it: text, Markdown and LaTeX, and the file that `--out` names.

Text from recipes and names is escaped, so that it never becomes markup.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_text
from lapcli.runtime.tables import fitted, wrapped

GAP = "-"


@dataclass(frozen=True)
class Entry:
    """The text of one cell; `after` follows the marked text, such as the (3) in `91.00 ± 1.73 (3)`."""

    text: str
    after: str = ""
    mark: Literal["best", "second"] | None = None
    is_number: bool = False  # mathematics in LaTeX


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    notes: Sequence[str] = ()

    @property
    def has_marks(self) -> bool:
        return any(entry.mark for row in self.rows for entry in row)


def to_text(table: Table, width: int | None = None) -> str:
    marks = {"best": " *", "second": " +", None: ""}
    rows = [[entry.text + entry.after + marks[entry.mark] for entry in row] for row in table.rows]
    legend = ["* best, + second."] if table.has_marks else []
    notes = [line for note in [*legend, *table.notes] for line in wrapped(note, width=width, indent="  ")]
    lines = fitted([list(table.header), *rows], width=width)
    return "\n".join([*wrapped(table.title, width=width), "", *lines, "", *notes])


def _with_marking(table: Table) -> list[str]:
    return [*table.notes, *(["Best in bold, second best underlined."] if table.has_marks else [])]


def to_markdown(table: Table) -> str:
    marks = {"best": ("**", "**"), "second": ("<u>", "</u>"), None: ("", "")}
    rows = [list(map(_escaped_markdown, table.header)), ["---"] * len(table.header)]
    for row in table.rows:
        rows.append([_escaped_markdown(entry.text + entry.after).join(marks[entry.mark]) for entry in row])
    # Two trailing spaces are Markdown's line break.
    notes = [_escaped_markdown(line) + "  " for line in _with_marking(table)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"**{_escaped_markdown(table.title)}**", "", *lines, "", *notes])


def _escaped_markdown(text: str) -> str:
    escaped = "".join(f"\\{letter}" if letter in "\\|`*_[]<>#" else letter for letter in text)
    return escaped.replace("&", "&amp;").replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "[": "{[}",  # at the start of a row it would be read as the optional argument of the \\ before
    "]": "{]}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "·": r"\textperiodcentered{}",
    "−": r"$-$",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
}


def to_latex(table: Table) -> str:
    """Format a table in the paper's style; LaTeX needs only the package booktabs."""
    header = [f"\\textbf{{{_escaped_latex(name)}}}" for name in table.header]
    caption = _escaped_latex(" ".join([f"{table.title}.", *_with_marking(table)]))
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}[h]",
        "  \\centering",
        f"  \\caption{{{caption}}}",
        f"  \\begin{{tabular}}{{@{{}}l{'c' * (len(header) - 1)}@{{}}}}",
        "    \\toprule",
        "    " + " & ".join(header) + " \\\\",
        "    \\midrule",
        *("    " + " & ".join(map(_latex_entry, row)) + " \\\\" for row in table.rows),
    ]
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}"])


def _latex_entry(entry: Entry) -> str:
    if not entry.is_number:
        return _escaped_latex(entry.text + entry.after)
    if entry.text == GAP:
        return "--"
    number = entry.text.replace("±", r"\pm")
    text = f"$\\mathbf{{{number}}}$" if entry.mark == "best" else f"${number}$"
    return (f"\\underline{{{text}}}" if entry.mark == "second" else text) + entry.after


def _escaped_latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter if letter.isascii() else "?") for letter in text.replace("\n", " "))


def write_for_user(path: Path, text: str) -> None:
    """Write text to the place that a user named with --out."""
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe: to be written to, not replaced
            path.write_bytes(text.encode("utf-8"))
        else:
            write_text(path.resolve(), text)  # a link stays, and what it points to is written
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); name another file") from None
