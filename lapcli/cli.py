"""The command line: registers commands and turns errors into exit codes. It imports no torch, for a fast `--help`."""

import gc
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from lapcli import __version__
from lapcli.commands import (
    analyze,
    chat,
    doctor,
    eval,
    export,
    fetch,
    import_,
    init,
    ladder,
    plan,
    recipes,
    report,
    runs,
    sample,
    search,
    sft,
    sweep,
    train,
)
from lapcli.runtime.environment import (
    end_process,
    inside_torchrun,
    is_main_process,
    launcher,
    sleep_while_waiting,
    stopped_mark,
)
from lapcli.runtime.errors import STOPPED, ExitCode, Interrupted, LapError, UsageError, from_os_error
from lapcli.runtime.tables import wrapped_message

#: The commands as `lap --help` lists them, each in one section.
SECTIONS: dict[str, dict[str, Any]] = {
    "Start": {"init": init.init, "recipes": recipes.recipes, "doctor": doctor.doctor, "fetch": fetch.fetch},
    "Train": {
        "train": train.train,
        "sft": sft.sft,
        "plan": plan.plan,
        "sweep": sweep.sweep,
        "search": search.search,
        "ladder": ladder.ladder,
    },
    "Measure": {"eval": eval.evaluate, "analyze": analyze.analyze, "report": report.report},
    "Ask a model": {"sample": sample.sample, "chat": chat.chat},
    "Look after runs": {"runs": runs.app},
    "Exchange weights": {"export": export.export, "import": import_.import_},
}


class CommandsInSections(TyperGroup):
    """Lists the commands by purpose, each with its complete first sentence."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [name for names in SECTIONS.values() for name in names]

    def format_commands(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        longest = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            with formatter.section(title):
                whole_line = 10 * formatter.width  # wrapped, not cut
                rows = [(f"{name:<{longest}}", self.commands[name].get_short_help_str(whole_line)) for name in names]
                formatter.write_dl(rows)


app = typer.Typer(
    cls=CommandsInSections,
    name="lap",
    help="Transformers with Laplacian heads (I - P in place of P): train them and reproduce the paper.",
    epilog="First time here: lap train quickstart",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lap {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _section in SECTIONS.values():
    for _name, _command in _section.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            _module = sys.modules[_command.__module__]
            app.command(_name, epilog=_module.EXAMPLES)(_command)


#: New objects before Python's garbage collector looks for cycles. Imports create a million lasting objects, and
#: collecting after every 700 takes a seventh of the start; a training step leaves no cycles at all.
COLLECT_EVERY = 50_000


def main() -> None:
    """Run a command; an error that a user can cause becomes one message on stderr and an exit code, no traceback."""
    sleep_while_waiting()
    gc.set_threshold(COLLECT_EVERY)
    if sys.stdin is None:  # closed, as by `lap chat <&-`: treated as empty
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if (mark := stopped_mark()) is not None and mark.exists():  # restarted after the launch was asked to stop
        end_process(ExitCode.DONE)
    end_process(_run())


def _run() -> int:
    """Run the command and return its exit code, after its message is printed."""
    try:
        code = int(app(standalone_mode=False) or ExitCode.DONE)
        if code == ExitCode.STOPPED:  # by Ctrl-C, where there was nothing to save
            print(STOPPED, file=sys.stderr)
        return code
    except TyperException as error:
        return _print_usage_error(error)
    except LapError as error:
        if not _said_elsewhere(error):
            print(wrapped_message(f"lap: {error}"), file=sys.stderr)
        return error.exit_code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else ExitCode.DONE
    except KeyboardInterrupt:  # outside of typer's own handling
        print(STOPPED, file=sys.stderr)
        return ExitCode.STOPPED
    except BrokenPipeError:  # `lap ... | head`
        return ExitCode.FAILED
    except OSError as error:
        explained = from_os_error(error)
        print(wrapped_message(f"lap: {explained}"), file=sys.stderr)
        return explained.exit_code
    except Exception:
        if not inside_torchrun():
            raise
        traceback.print_exc()
        return ExitCode.FAILED


def _print_usage_error(error: Any) -> int:
    """Print Typer's message about unknown words and, for a command with a recipe, how to change a key."""
    error.show()
    parameters = {parameter.name for parameter in error.ctx.command.params} if getattr(error, "ctx", None) else set()
    if hasattr(error, "possibilities") and {"recipe", "set_"} <= parameters:  # an unknown option
        print("A key of the recipe is changed by --set, as in --set train.steps=100.", file=sys.stderr)
    return int(error.exit_code)


def _said_elsewhere(error: LapError) -> bool:
    """Return whether rank 0 prints this error too: ranks refuse and stop together, and one message is enough.

    The launcher reports a lost rank.
    """
    if error.exit_code == ExitCode.LOST_PEER:
        return launcher() is not None
    return not is_main_process() and (error.is_echo or isinstance(error, UsageError | Interrupted))
