"""`lap analyze WHAT`: the paper's measurements and figures, on any model."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap analyze all
  lap analyze spectrum 'vit_digits-*'
  lap analyze cossim vit_digits --init
  lap analyze features vit_digits --image photo.jpg
  lap analyze anova timm:vit_small_patch16_224 --data photographs
"""

ALL = "all"  # every measurement that fits
MEASUREMENT_NAMES = "spectrum, anova, cossim, snr, collapse, simplex, pca, updates, sinks, features, mixing, ov"


def _measurement(name: str) -> str:
    from lapcli.analysis.measurements import MEASUREMENTS

    if name != ALL:
        MEASUREMENTS[name]  # refuses an unknown name with the nearest one
    return name


def analyze(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", callback=_measurement, help=f"One of {MEASUREMENT_NAMES}; or all that fit.")
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=options.run_names,
            help="Names, folders or patterns of runs, or timm:NAME of a stock model; default: newest finished run.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        list[str] | None,
        typer.Option("--run", autocompletion=options.run_names, help="Another spelling of RUN; repeatable."),
    ] = None,
    init: Annotated[
        bool, typer.Option("--init", help="Also measure each run's model untrained; a timm model, only untrained.")
    ] = False,
    checkpoint: options.Checkpoint = "last",
    data: Annotated[str | None, typer.Option("--data", help="Data to measure on instead of the run's own.")] = None,
    split: Annotated[
        Literal["validation", "train"], typer.Option("--split", help="Part of the data to measure.")
    ] = "validation",
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, help="Sequences or images.", show_default="512 of text, all images"),
    ] = None,
    layer: Annotated[
        str | None, typer.Option("--layer", help="last, all, 3, 0,5,11 or 6-11; counted from 0, -1 is the last.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="A,B,C", help="Names or numbers of classes, for simplex and pca.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option("--image", help="An image file, for features; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the results.", show_default="RUN/analysis")
    ] = None,
    runs_dir: options.RunsDir = None,
    as_json: options.Json = False,
) -> None:
    """Measure the tokens of runs and draw the paper's figures."""
    from lapcli.analysis.measurement import OPTIONS, Settings
    from lapcli.analysis.measurements import MEASUREMENTS, check_fits
    from lapcli.recipe import OBJECTIVES
    from lapcli.recipe.schema import TIMM
    from lapcli.recipe.section import check_local_file
    from lapcli.result_rows import find_paths
    from lapcli.runs import named_run, newest_run

    # Checked before torch is imported, so that errors appear within half a second.
    for path in image or []:
        if not path.is_file():
            raise UsageError(f"--image {path} does not exist; name an image file")
    settings = Settings(checkpoint, init, data, split, limit, layer, classes, tuple(image or ()))
    if what != ALL and (unused := settings.given(*(OPTIONS - set(MEASUREMENTS[what].options)))):
        raise UsageError(f"--{min(unused)} has no effect for {what}; leave it out")
    if data is not None:
        check_local_file("--data", data)
    where = runs_dir or default_runs_dir()
    given_names = [*(names or []), *(run or [])]
    stock = [name for name in given_names if name.startswith(TIMM)]
    named = [name for name in given_names if name not in stock]
    runs = [named_run(where, str(path)) for path in find_paths(named, where)] if named else []
    if not given_names:
        runs = [newest_run(where, set(OBJECTIVES))]
    if what != ALL and runs:
        check_fits([what], [(run.recipe.objective, run.recipe.gives) for run in runs])

    from lapcli.runtime.progress import say_start

    say_start("loading torch and the models")

    from lapcli.analysis.analyze import analyze, to_text, write_analysis
    from lapcli.analysis.analyzed_models import find_models, results_folder

    models = find_models(settings, runs, stock)
    analyses = analyze(None if what == ALL else [what], models, settings)
    folder = out or results_folder(models, where) / settings.variant
    written = {analysis.what: write_analysis(analysis, folder) for analysis in analyses}
    if as_json:
        records = [analysis.to_dict() for analysis in analyses]
        print(json.dumps(records if what == ALL else records[0], indent=2))
        return
    print("\n\n".join(to_text(analysis, written[analysis.what]) for analysis in analyses))
