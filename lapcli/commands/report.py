"""`lap report`: print tables of runs beside the paper's, or write a page that shows everything."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.report.forms import to_latex, to_markdown, to_text, write_for_user
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.tables import wrapped_message

EXAMPLES = """\b
Examples:
  lap report --paper table1 --strict
  lap report 'quickstart-*' --columns validation_loss,k_0.99 --format csv --out laptop.csv
  lap report --format html --watch
  lap report 'vit_digits*' --format pdf --size 5x3.2 --out figures
"""

# As in report/grouping.py, which is not imported here: `lap --help` imports this file and must answer at once.
HEADS = "model.laplacian_heads"
Format = Literal["table", "markdown", "latex", "csv", "html", "json", "svg", "png", "pdf"]


def report(
    runs: options.Runs = None,
    rows: Annotated[
        str, typer.Option("--rows", metavar="KEY,...", help="Keys of the recipe whose values are the rows.")
    ] = HEADS,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="NAME,...",
            help="Scores, such as top1, k_0.99 or costs; by default those that were evaluated.",
        ),
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="Format of the tables; html: a whole page; svg, png, pdf: its figures.")
    ] = "table",
    paper: Annotated[
        Literal["table1", "table2", "table3"] | None,
        typer.Option("--paper", help="The paper's table beside ours: images, language, self-supervised."),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline", metavar="ROW", help="Row to compare with; by default the one without Laplacian heads."
        ),
    ] = None,
    ddof: Annotated[
        int | None,
        typer.Option(
            "--ddof", min=0, max=1, help="Deviations divide by n - ddof.", show_default="1; table2: standard errors"
        ),
    ] = None,
    checkpoint: Annotated[
        Literal["last", "best"], typer.Option("--checkpoint", help="Scores of the last weights or of the best.")
    ] = "last",
    effects: Annotated[
        str | None,
        typer.Option(
            "--effects", metavar="KEY,...", help="Recipe keys with two values each: show how the gain depends on them."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a score is missing.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write instead of printing; for figures, a folder.",
            show_default="RUNS_DIR/report.html, RUNS_DIR/report_figures",
        ),
    ] = None,
    dpi: options.Dpi = 160,
    size: options.Size = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="With html: rewrite the page while runs are being trained, until Ctrl-C.")
    ] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, help="Seconds between two updates of --watch.")] = 10.0,
    runs_dir: options.RunsDir = None,
) -> None:
    """Put runs into tables beside the paper's, and onto a page with figures and claims."""
    from lapcli.analysis.drawing import FigureFormat, size_of
    from lapcli.report.assemble import Report, report_on
    from lapcli.report.grouping import names_in, row_keys
    from lapcli.report.tables import FORMATS

    if watch and format_ != "html":
        raise UsageError(
            "--watch rewrites the page while runs are being trained; use --format html, or `lap runs watch`"
        )
    folder = runs_dir or default_runs_dir()
    figure_format = FigureFormat(None if size is None else size_of(size), dpi)
    keys = row_keys(paper, format_, rows, columns, baseline)

    def make() -> Report:
        return report_on(
            runs or [],
            folder,
            rows=keys,
            columns=None if columns is None else names_in("--columns", columns),
            baseline=baseline,
            which=checkpoint,
            ddof=1 if ddof is None else ddof,
        )

    if watch:
        from lapcli.report.collect import find_paths
        from lapcli.report.watching import watch_page

        watch_page(lambda: find_paths(runs or [], folder), make, out or folder / "report.html", figure_format, every)
        return
    made = make()
    if effects is not None:
        from lapcli.report.effects import effect_tables

        if columns is None or format_ not in ("table", "markdown", "latex"):
            raise UsageError("--effects needs --columns, and is a table: --format table, markdown or latex")
        tables = effect_tables(made, names_in("--effects", effects), names_in("--columns", columns), baseline)
        text = "\n\n".join(map({"table": to_text, "markdown": to_markdown, "latex": to_latex}[format_], tables))
        print(text) if out is None else write_for_user(out, text + "\n")
        return
    if paper is not None:
        from lapcli.report.paper_tables import paper_tables

        made.tables = paper_tables(paper, made.collection.runs, ddof)
    if format_ == "html":
        from lapcli.report.page import write_page

        for path in write_page(made, out or folder / "report.html", figure_format):
            print(path)
    elif format_ in ("svg", "png", "pdf"):
        from lapcli.report.figures import draw_all, write_files

        for path in write_files(draw_all(made.grids), out or folder / "report_figures", [format_], figure_format):
            print(path)
    elif out is None:
        print(FORMATS[format_](made.tables))
    else:
        write_for_user(out, FORMATS[format_](made.tables) + "\n")
        print(out)
    for line in [*(f"note: {note}" for note in made.notes), *(f"gap: {gap}" for gap in made.gaps())]:
        print(wrapped_message(line), file=sys.stderr)
    if strict and made.gaps():
        raise typer.Exit(1)
