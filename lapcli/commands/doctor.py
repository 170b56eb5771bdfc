"""`lap doctor`: check that this machine computes, trains and synchronises correctly."""

import json
import sys
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.errors import ExitCode
from lapcli.runtime.launch import Processes

Section = Literal["environment", "kernels", "training", "processes"]
EXAMPLES = """\b
Examples:
  lap doctor
  lap doctor --only kernels
  lap doctor --only processes --nproc 2
  lap doctor --json > doctor.json
"""


def doctor(
    only: Annotated[
        Section | None,
        typer.Option("--only", help="Run this section only; by default all, in this order."),
    ] = None,
    nproc: options.Nproc = "auto",
    as_json: options.Json = False,
) -> None:
    """Check that this machine computes, trains and synchronises correctly.

    Each check passes, warns or fails, with its value and the next step; exit code 1 if any fails. It takes a minute or
    two, works in a temporary folder, and sends no data anywhere. Attach its JSON to bug reports.
    """

    if nproc != "auto":
        Processes(nproc).here()  # refused before torch is imported

    from lapcli.doctor import examine_machine, versions
    from lapcli.doctor.checks import Result

    results: list[Result] = []
    # Checks take minutes, so that each is shown when it is done; with --json stdout has only the object.
    stream = sys.stderr if as_json else sys.stdout
    for result in examine_machine(only, nproc):
        if not results or results[-1].section != result.section:
            print(result.section, file=stream)
        results.append(result)
        print(result.to_text(), file=stream, flush=True)
    statuses = [result.finding.status for result in results]
    counts = {status: statuses.count(status) for status in ("passes", "warns", "fails")}
    if as_json:
        print(json.dumps({**versions(), **counts, "checks": [result.to_dict() for result in results]}, indent=2))
    else:
        print(f"{counts['passes']} pass, {counts['warns']} warn, {counts['fails']} fail")
    if counts["fails"]:
        raise typer.Exit(ExitCode.FAILED)
