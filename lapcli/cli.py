"""The command line: names the commands and turns errors into exit codes. No torch in here: help answers at once."""

import gc
import os
import sys
from typing import Annotated

import typer

from lapcli import __version__
from lapcli.commands.analyze import app as analyze
from lapcli.commands.chat import EXAMPLES as CHAT_EXAMPLES
from lapcli.commands.chat import chat
from lapcli.commands.doctor import EXAMPLES as DOCTOR_EXAMPLES
from lapcli.commands.doctor import doctor
from lapcli.commands.eval import EXAMPLES as EVAL_EXAMPLES
from lapcli.commands.eval import evaluate
from lapcli.commands.export import EXAMPLES as EXPORT_EXAMPLES
from lapcli.commands.export import export
from lapcli.commands.fetch import EXAMPLES as FETCH_EXAMPLES
from lapcli.commands.fetch import fetch
from lapcli.commands.import_ import EXAMPLES as IMPORT_EXAMPLES
from lapcli.commands.import_ import import_
from lapcli.commands.init import EXAMPLES as INIT_EXAMPLES
from lapcli.commands.init import init
from lapcli.commands.plan import EXAMPLES as PLAN_EXAMPLES
from lapcli.commands.plan import plan
from lapcli.commands.push import EXAMPLES as PUSH_EXAMPLES
from lapcli.commands.push import push
from lapcli.commands.recipes import EXAMPLES as RECIPES_EXAMPLES
from lapcli.commands.recipes import recipes
from lapcli.commands.report import EXAMPLES as REPORT_EXAMPLES
from lapcli.commands.report import report
from lapcli.commands.runs import app as runs
from lapcli.commands.sample import EXAMPLES as SAMPLE_EXAMPLES
from lapcli.commands.sample import sample
from lapcli.commands.sft import EXAMPLES as SFT_EXAMPLES
from lapcli.commands.sft import sft
from lapcli.commands.sweep import EXAMPLES as SWEEP_EXAMPLES
from lapcli.commands.sweep import sweep
from lapcli.commands.track import EXAMPLES as TRACK_EXAMPLES
from lapcli.commands.track import track
from lapcli.commands.train import EXAMPLES as TRAIN_EXAMPLES
from lapcli.commands.train import train
from lapcli.commands.watch import EXAMPLES as WATCH_EXAMPLES
from lapcli.commands.watch import watch
from lapcli.runtime.environment import wait_politely
from lapcli.runtime.errors import ExitCode, Interrupted, LapError, UsageError, of_system
from lapcli.runtime.tables import wrapped_message

app = typer.Typer(
    name="lap",
    help="Transformers with Laplacian heads (I - P in place of P): train them and reproduce the paper.",
    epilog="First time here: lap train recipes/quickstart.yaml",
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


app.command(epilog=TRAIN_EXAMPLES)(train)
app.command(epilog=SWEEP_EXAMPLES)(sweep)
app.command("eval", epilog=EVAL_EXAMPLES)(evaluate)
app.add_typer(analyze, name="analyze")
app.command(epilog=SFT_EXAMPLES)(sft)
app.command(epilog=CHAT_EXAMPLES)(chat)
app.command(epilog=SAMPLE_EXAMPLES)(sample)
app.command(epilog=FETCH_EXAMPLES)(fetch)
app.command(epilog=PLAN_EXAMPLES)(plan)
app.command(epilog=DOCTOR_EXAMPLES)(doctor)
app.command(epilog=REPORT_EXAMPLES)(report)
app.add_typer(runs, name="runs")
app.command(epilog=EXPORT_EXAMPLES)(export)
app.command(epilog=PUSH_EXAMPLES)(push)
app.command("import", epilog=IMPORT_EXAMPLES)(import_)
app.command(epilog=WATCH_EXAMPLES)(watch)
app.command(epilog=TRACK_EXAMPLES)(track)
app.command(epilog=RECIPES_EXAMPLES)(recipes)
app.command(epilog=INIT_EXAMPLES)(init)


#: New objects until Python looks for cycles among them. Imports make a million that stay, and looking at them again
#: every 700 is a seventh of a start; a training step leaves no cycles at all.
COLLECT_EVERY = 50_000


def main() -> None:
    """Runs a command; an error that a user can cause is one message on stderr and an exit code, never a traceback."""
    wait_politely()
    gc.set_threshold(COLLECT_EVERY)
    try:
        os.getcwd()
    except OSError:  # before libraries are loaded that end the process without a word of ours
        print("lap: the working directory was removed; change to another one (cd), then try again", file=sys.stderr)
        raise SystemExit(int(ExitCode.USAGE)) from None
    try:
        app()
    except LapError as error:
        if not _said_by_rank_0(error):
            print(wrapped_message(f"lap: {error}"), file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None
    except SystemExit as stop:
        if stop.code == ExitCode.STOPPED:  # by Ctrl-C, where nothing was in the making that could be saved
            print("lap: stopped; what was saved is kept, run the same command to resume", file=sys.stderr)
        raise
    except BrokenPipeError:  # `lap ... | head`
        raise SystemExit(1) from None
    except OSError as error:
        explained = of_system(error)
        print(wrapped_message(f"lap: {explained}"), file=sys.stderr)
        raise SystemExit(int(explained.exit_code)) from None


def _said_by_rank_0(error: LapError) -> bool:
    """Ranks refuse and stop together; one of them says so."""
    return os.environ.get("RANK", "0") != "0" and (error.is_echo or isinstance(error, UsageError | Interrupted))
