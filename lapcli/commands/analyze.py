"""`lap analyze WHAT`: the paper's measurements and figures, on any model."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lapcli.analysis.catalogue import CATALOGUE
from lapcli.commands import options

EXAMPLES = """\b
Examples:
  lap analyze all
  lap analyze spectrum --runs 'vit_digits-*'
  lap analyze cossim --run vit_digits --init
  lap analyze features --run vit_digits --image photo.jpg
"""

app = typer.Typer(
    help="Measure the tokens of a run and draw the paper's figures.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

#: Options that every measurement has, then those that some have; each is declared here, once.
_SHARED: dict[str, tuple[Any, Any]] = {
    "run": (
        Annotated[
            list[str] | None,
            typer.Option("--run", help="Name or folder of a run; repeatable. Default: the newest finished one."),
        ],
        None,
    ),
    "runs": (
        Annotated[str | None, typer.Option("--runs", metavar="PATTERN", help="All runs of such names: 'vit_*'.")],
        None,
    ),
    "model": (
        Annotated[
            list[str] | None, typer.Option("--model", metavar="timm:NAME", help="A stock timm model; repeatable.")
        ],
        None,
    ),
    "init": (
        Annotated[bool, typer.Option("--init", help="Also each run's model untrained; of --model, untrained instead.")],
        False,
    ),
    "checkpoint": (
        Annotated[str, typer.Option("--checkpoint", help="last, best, or a step that was kept.")],
        "last",
    ),
    "stage": (
        Annotated[
            Literal["midtrain", "sft"] | None, typer.Option("--stage", help="The run's chat stage, not the run itself.")
        ],
        None,
    ),
    "data": (Annotated[str | None, typer.Option("--data", help="Data to measure on, not the run's own.")], None),
    "split": (Annotated[Literal["validation", "train"], typer.Option("--split", help="Which part.")], "validation"),
    "limit": (
        Annotated[
            int | None,
            typer.Option("--limit", min=1, help="Sequences or images.", show_default="512 of text, all images"),
        ],
        None,
    ),
    "batch": (Annotated[int | None, typer.Option("--batch", min=1, help="Sequences or images at once.")], None),
    "seed": (Annotated[int, typer.Option("--seed", min=0, help="Of samples and draws.")], 0),
    "out": (
        Annotated[Path | None, typer.Option("--out", help="Folder for the results.", show_default="RUN/analysis")],
        None,
    ),
    "runs_dir": (options.RunsDir, None),
    "as_json": (options.Json, False),
}
_OWN: dict[str, tuple[Any, Any]] = {
    "layer": (
        Annotated[str | None, typer.Option("--layer", help="last, all, 3, 0,5,11 or 6-11; from 0, -1 is the last.")],
        None,
    ),
    "tokens": (
        Annotated[Literal["all", "patch", "class"], typer.Option("--tokens", help="Which tokens of an image.")],
        "all",
    ),
    "norm": (
        Annotated[
            Literal["before", "after"] | None, typer.Option("--norm", help="Before or after the model's last norm.")
        ],
        None,
    ),
    "min_count": (
        Annotated[int, typer.Option("--min-count", min=1, help="Leave out classes with fewer examples.")],
        2,
    ),
    "center": (
        Annotated[Literal["none", "global"], typer.Option("--center", help="Subtract the mean token first.")],
        "none",
    ),
    "classes": (
        Annotated[str | None, typer.Option("--classes", metavar="A,B,C", help="Names or numbers of classes to show.")],
        None,
    ),
    "images": (
        Annotated[list[Path] | None, typer.Option("--image", help="An image file; repeatable.")],
        None,
    ),
    "overlay": (Annotated[bool, typer.Option("--overlay", help="Colours over the image, not beside it.")], False),
}


def _command(what: str | None) -> Callable[..., None]:
    """The command of one measurement (None: all), with the options that mean something for it and no others."""
    own = CATALOGUE[what].options if what else tuple(_OWN)
    declared = {name: _OWN[name] for name in own} | _SHARED

    def run(**given: Any) -> None:
        _analyze(what, **given)

    run.__doc__ = CATALOGUE[what].help if what else "Everything that fits the run's kind, in one pass over the data."
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in declared.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: annotation for name, (annotation, _) in declared.items()}
    return run


for _name in (*CATALOGUE, "all"):
    app.command(
        _name, epilog=f"\b\nExamples:\n  lap analyze {_name}\n  lap analyze {_name} --runs 'vit_digits-*' --json"
    )(_command(None if _name == "all" else _name))


def _analyze(what: str | None, **given: Any) -> None:
    import json

    from lapcli.analysis.choice import Choice, find_runs
    from lapcli.runtime.environment import runs_dir as default_runs_dir
    from lapcli.runtime.errors import UsageError

    runs_dir = given["runs_dir"] or default_runs_dir()
    choice = Choice(
        runs_dir,
        given["run"] or (),
        given["runs"],
        given["model"] or (),
        **{name: given[name] for name in ("init", "checkpoint", "stage", "data", "split", "limit", "batch", "seed")},
    )
    runs = find_runs(choice)
    for path in given.get("images") or ():
        if not path.is_file():
            raise UsageError(f"--image {path} is not there; name a file with an image")

    from lapcli.analysis import output
    from lapcli.analysis.analyze import analyze
    from lapcli.analysis.measure import Settings
    from lapcli.analysis.subjects import find_subjects, place_of

    own = {name: given[name] for name in _OWN if name in given}
    if "images" in own:
        own["images"] = tuple(own["images"] or ())
    settings = Settings(**own, seed=given["seed"])
    subjects = find_subjects(choice, runs)
    analyses = analyze(None if what is None else [what], subjects, settings)
    folder = given["out"] or place_of(subjects, runs_dir)
    written = {analysis.what: output.write(analysis, folder) for analysis in analyses}
    if given["as_json"]:
        told = [analysis.to_dict() for analysis in analyses]
        print(json.dumps(told[0] if what else told, indent=2))
        return
    print("\n\n".join(output.to_text(analysis, written[analysis.what]) for analysis in analyses))
