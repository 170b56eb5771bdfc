"""`lap analyze WHAT`: the paper's measurements and figures, on any model."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_group

from lapcli.commands import options

if TYPE_CHECKING:
    from lapcli.analysis.measurement import Option, Settings

EXAMPLES = """\b
Examples:
  lap analyze all
  lap analyze spectrum --runs 'vit_digits-*'
  lap analyze cossim --run vit_digits --init
  lap analyze features --run vit_digits --image photo.jpg
"""

#: Options that every measurement has; those of its own are declared in its file.
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


def _measurement_commands() -> typer.Typer:
    from lapcli.analysis.registry import MEASUREMENTS

    commands = typer.Typer(rich_markup_mode=None)
    entries: list[tuple[str, str, Sequence[Option], list[str] | None]] = [
        (name, measurement.help, measurement.options, [name]) for name, measurement in MEASUREMENTS.items()
    ]
    help_of_all = "Everything that fits the run's kind, in one pass over the data."
    entries.append(("all", help_of_all, MEASUREMENTS.options(), None))
    for name, help, own, what in entries:
        epilog = f"\b\nExamples:\n  lap analyze {name}\n  lap analyze {name} --runs 'vit_digits-*' --json"
        commands.command(name, help=help, epilog=epilog)(_command(own, what))
    return commands


class _MeasurementGroup(TyperGroup):
    """A command for each measurement, added when they are first asked for: `lap --help` does not import them."""

    def _complete(self) -> None:
        if not self.commands:
            self.commands.update(get_group(_measurement_commands()).commands)

    def list_commands(self, ctx: Any) -> list[str]:
        self._complete()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._complete()
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=_MeasurementGroup,
    help="Measure the tokens of a run and draw the paper's figures.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _command(own: Sequence["Option"], what: list[str] | None) -> Callable[..., None]:
    """A command with the options that the measurement has, and those that all have."""
    declared = {option.name: _declaration(option) for option in own} | _SHARED

    def run(**given: Any) -> None:
        from lapcli.analysis.measurement import Settings

        values = {o.name: tuple(given[o.name] or ()) if o.is_repeatable else given[o.name] for o in own}
        _analyze(what, Settings(values, given["seed"]), given)

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in declared.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {name: annotation for name, (annotation, _) in declared.items()}
    return run


def _declaration(option: "Option") -> tuple[Any, Any]:
    """What typer needs: an annotation and a default."""
    parameter = typer.Option(option.flag, help=option.help, metavar=option.metavar, min=option.minimum)
    if option.is_repeatable:
        return Annotated[list[option.type] | None, parameter], None  # type: ignore[name-defined]
    return Annotated[option.type, parameter], option.default


def _analyze(what: list[str] | None, settings: "Settings", given: dict[str, Any]) -> None:
    """`what`: names of measurements; None: all that fit."""
    import json

    from lapcli.analysis.registry import MEASUREMENTS
    from lapcli.analysis.selection import Selection, find_runs
    from lapcli.runtime.environment import runs_dir as default_runs_dir

    runs_dir = given["runs_dir"] or default_runs_dir()
    selection = Selection(
        runs_dir,
        given["run"] or (),
        given["runs"],
        given["model"] or (),
        **{name: given[name] for name in ("init", "checkpoint", "stage", "data", "split", "limit", "batch", "seed")},
    )
    runs = find_runs(selection)
    for name in what or MEASUREMENTS:
        MEASUREMENTS[name].check_options(settings)

    from lapcli.analysis import output
    from lapcli.analysis.analyze import analyze
    from lapcli.analysis.analyzed_models import find_models, results_folder

    models = find_models(selection, runs)
    analyses = analyze(what, models, settings)
    folder = given["out"] or results_folder(models, runs_dir)
    written = {analysis.what: output.write(analysis, folder) for analysis in analyses}
    if given["as_json"]:
        told = [analysis.to_dict() for analysis in analyses]
        print(json.dumps(told[0] if what else told, indent=2))
        return
    print("\n\n".join(output.to_text(analysis, written[analysis.what]) for analysis in analyses))
