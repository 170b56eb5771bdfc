"""`lap analyze WHAT`: the paper's measurements and figures, on any model."""

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.main import get_group

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir

if TYPE_CHECKING:
    from lapcli.analysis.measurement import Option, Settings

EXAMPLES = """\b
Examples:
  lap analyze all
  lap analyze spectrum --runs 'vit_digits-*'
  lap analyze cossim vit_digits --init
  lap analyze features vit_digits --image photo.jpg
"""

ALL = "all"  # every measurement that fits
#: Options that every measurement has; its other options are declared in its file.
_SHARED: dict[str, tuple[Any, Any]] = {
    "names": (
        Annotated[
            list[str] | None,
            typer.Argument(
                metavar="RUN",
                autocompletion=options.run_names,
                help="Names or folders of runs; by default the newest finished one.",
                show_default=False,
            ),
        ],
        None,
    ),
    "run": (
        Annotated[
            list[str] | None,
            typer.Option("--run", autocompletion=options.run_names, help="Another spelling of RUN; repeatable."),
        ],
        None,
    ),
    "runs": (
        Annotated[
            str | None, typer.Option("--runs", metavar="PATTERN", help="All runs whose names match, e.g. 'vit_*'.")
        ],
        None,
    ),
    "model": (
        Annotated[
            list[str] | None, typer.Option("--model", metavar="timm:NAME", help="A stock timm model; repeatable.")
        ],
        None,
    ),
    "init": (
        Annotated[
            bool, typer.Option("--init", help="Also measure each run's model untrained; with --model, only untrained.")
        ],
        False,
    ),
    "checkpoint": (options.Checkpoint, "last"),
    "stage": (
        Annotated[
            Literal["midtrain", "sft"] | None,
            typer.Option("--stage", help="Measure this chat stage of the run instead of the run itself."),
        ],
        None,
    ),
    "data": (Annotated[str | None, typer.Option("--data", help="Data to measure on instead of the run's own.")], None),
    "split": (
        Annotated[Literal["validation", "train"], typer.Option("--split", help="Part of the data to measure.")],
        "validation",
    ),
    "limit": (
        Annotated[
            int | None,
            typer.Option("--limit", min=1, help="Sequences or images.", show_default="512 of text, all images"),
        ],
        None,
    ),
    "batch": (
        Annotated[int | None, typer.Option("--batch", min=1, help="Sequences or images per forward pass.")],
        None,
    ),
    "seed": (Annotated[int, typer.Option("--seed", min=0, help="Random seed.")], 0),
    "out": (
        Annotated[Path | None, typer.Option("--out", help="Folder for the results.", show_default="RUN/analysis")],
        None,
    ),
    "dpi": (options.Dpi, 160),
    "size": (options.Size, None),
    "format": (
        Annotated[str, typer.Option("--format", metavar="png,svg,pdf", help="File formats of the figure.")],
        "png,svg",
    ),
    "runs_dir": (options.RunsDir, None),
    "as_json": (options.Json, False),
}


class _MeasurementGroup(TyperGroup):
    """A command for each measurement, added on first use, so that `lap --help` does not import them.

    Help lists the built-in ones; an unknown name is looked up in plugins.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_built_in()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from lapcli.analysis.measurements import MEASUREMENTS

        self._add_built_in()
        if cmd_name not in self.commands and cmd_name in MEASUREMENTS:
            self._add([cmd_name])
        return super().get_command(ctx, cmd_name)

    def _add_built_in(self) -> None:
        from lapcli.analysis.measurements import MEASUREMENTS

        if not self.commands:
            self._add([*MEASUREMENTS.built_in(), ALL])

    def _add(self, names: list[str]) -> None:
        commands = typer.Typer(rich_markup_mode=None)
        for name in names:
            _add_command(commands, name)
        self.commands.update(get_group(commands).commands)


app = typer.Typer(
    cls=_MeasurementGroup,
    help="Measure the tokens of a run and draw the paper's figures.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _add_command(commands: typer.Typer, name: str) -> None:
    """Add a command with the measurement's own options and those that every measurement has."""
    from lapcli.analysis.measurements import MEASUREMENTS, built_in_options

    if name == ALL:
        help, own = "Everything that fits the run's kind, in one pass over the data.", tuple(built_in_options())
    else:
        help, own = MEASUREMENTS[name].help, MEASUREMENTS[name].options
    declared = {option.name: _declaration(option) for option in own} | _SHARED

    def run(**given: Any) -> None:
        from lapcli.analysis.measurement import Settings

        values = {o: tuple(given[o.name] or ()) if o.is_repeatable else given[o.name] for o in own}
        subject = {key: given[key] for key in ("checkpoint", "data", "split", "limit") if given[key] != _SHARED[key][1]}
        _analyze(None if name == ALL else name, Settings(values, given["seed"], subject), given)

    parameters = [
        inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for parameter, (annotation, default) in declared.items()
    ]
    # Typer reads both: the signature for names and defaults, the annotations through `get_type_hints`.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter: annotation for parameter, (annotation, _) in declared.items()}
    epilog = f"\b\nExamples:\n  lap analyze {name}\n  lap analyze {name} --runs 'vit_digits-*' --json"
    commands.command(name, help=help, epilog=epilog)(run)


def _declaration(option: "Option") -> tuple[Any, Any]:
    """Return the annotation and the default that typer needs."""
    parameter = typer.Option(option.flag, help=option.help, metavar=option.metavar, min=option.minimum)
    if option.is_repeatable:
        return Annotated[list[option.type] | None, parameter], None  # type: ignore[name-defined]
    return Annotated[option.type, parameter], option.default


def _analyze(what: str | None, settings: "Settings", given: dict[str, Any]) -> None:
    """Run the command. `what`: the name of a measurement; None: all that fit."""
    from lapcli.analysis.drawing import FigureFormat, forms_of, size_of
    from lapcli.analysis.measurements import MEASUREMENTS
    from lapcli.analysis.selection import Selection, find_runs

    runs_dir = given["runs_dir"] or default_runs_dir()
    selection = Selection(
        runs_dir,
        (*(given["names"] or ()), *(given["run"] or ())),
        given["runs"],
        given["model"] or (),
        **{name: given[name] for name in ("init", "checkpoint", "stage", "data", "split", "limit", "batch", "seed")},
    )
    figure_format = FigureFormat(
        None if given["size"] is None else size_of(given["size"]), given["dpi"], forms_of(given["format"])
    )
    # Before torch is imported: a wrong name is refused within half a second.
    runs = find_runs(selection)
    for name in MEASUREMENTS if what is None else [what]:
        MEASUREMENTS[name].check_options(settings)

    from lapcli.runtime.progress import say_start

    say_start("loading torch and the models")

    from lapcli.analysis.analyze import analyze, to_text, write_analysis
    from lapcli.analysis.analyzed_models import find_models, results_folder

    models = find_models(selection, runs)
    analyses = analyze(None if what is None else [what], models, settings)
    folder = given["out"] or results_folder(models, runs_dir) / settings.variant
    written = {analysis.what: write_analysis(analysis, folder, figure_format) for analysis in analyses}
    if given["as_json"]:
        records = [analysis.to_dict() for analysis in analyses]
        print(json.dumps(records[0] if what else records, indent=2))
        return
    print("\n\n".join(to_text(analysis, written[analysis.what]) for analysis in analyses))
