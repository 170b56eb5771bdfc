"""`lap report`: print tables of runs beside the paper's, or write a page that shows everything."""

import sys
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.tables import wrapped_message

EXAMPLES = """\b
Examples:
  lap report --paper table1
  lap report 'quickstart-*' --columns validation_loss,k_0.99 --format csv > laptop.csv
  lap report --format html
"""

HEADS = "model.laplacian_heads"  # not imported: `lap --help` imports this file and must answer at once
Format = Literal["table", "csv", "json", "html"]


def report(
    runs: options.Runs = None,
    rows: Annotated[
        str, typer.Option("--rows", metavar="KEY,...", help="Recipe keys whose values become the rows.")
    ] = HEADS,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", metavar="NAME,...", help="Scores, such as top1 or k_0.99; by default all evaluated ones."
        ),
    ] = None,
    format_: Annotated[
        Format,
        typer.Option("--format", help="Format of the tables; html: RUNS_DIR/report.html, and its figures beside it."),
    ] = "table",
    paper: Annotated[
        Literal["table1", "table2", "table3"] | None,
        typer.Option("--paper", help="The paper's table beside ours: images, language, self-supervised."),
    ] = None,
    runs_dir: options.RunsDir = None,
) -> None:
    """Tabulate runs beside the paper's results, or write a page with figures and claims."""
    from lapcli.report.paper import paper_tables
    from lapcli.report.tables import FORMATS, names_in, report_on, row_keys

    folder = runs_dir or default_runs_dir()
    made = report_on(
        runs or [],
        folder,
        rows=row_keys(paper, format_, rows, columns),
        columns=None if columns is None else names_in("--columns", columns),
    )
    if paper is not None:
        made.tables = paper_tables(paper, made.grids)
        made.notes.append(
            f"the commands that make these runs, their cost and the paper's numbers: docs/paper.md#{paper}"
        )
    if format_ == "html":
        from lapcli.report.page import write_page

        for path in write_page(made, folder / "report.html"):
            print(path)
    else:
        print(FORMATS[format_](made.tables))
        if format_ == "table" and not (runs or paper):
            from lapcli.report.page import ladders_in

            print("".join(f"\n{text}" for _, text, _ in ladders_in(folder)), end="")
    for note in made.notes:
        print(wrapped_message(f"note: {note}"), file=sys.stderr)
