"""`lap export`: write a run's weights as a folder for another library."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import LapError

EXAMPLES = """\b
Examples:
  lap export gpt561m_5L-sft --to hf
  lap export gpt561m_5L-sft --to hf --out my_model
  lap export vitb_imagenet_6L --to timm --checkpoint best
  lap export vit_digits --to safetensors --no-verify
"""


def export(
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf (transformers), timm or safetensors.")],
    run: options.Run = None,
    run_option: options.RunOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Output folder; by default export/FORMAT in the run.")
    ] = None,
    checkpoint: options.Checkpoint = "last",
    verify: Annotated[
        bool | None,
        typer.Option(
            "--verify/--no-verify",
            help="Load the folder with only the target library and compare; the default if it is installed.",
        ),
    ] = None,
    runs_dir: options.RunsDir = None,
) -> None:
    """Export a run for transformers or timm, or as plain safetensors, and verify the folder."""

    from lapcli.export import check_format
    from lapcli.recipe import OBJECTIVES
    from lapcli.runs import named_run, newest_run

    where = runs_dir or default_runs_dir()
    run = options.one_run(run, run_option)
    chosen = newest_run(where, set(OBJECTIVES)) if run is None else named_run(where, run)
    check_format(chosen, to)

    from lapcli.export.export import export_run

    written = export_run(chosen, to, out=out, checkpoint=checkpoint, verified=verify)
    record = written.record
    print(f"{chosen.path}, step {record['step']}, weights sha256 {record['weights_sha256']}", file=sys.stderr)
    for check in written.checks:
        state = "same" if check.holds else "DIFFERS"
        print(f"{check.name:<26}{check.difference:>9.1e}  {state:<8} {check.note}")
    print(f"written to {written.folder}" + ("" if written.checks else ", not verified"))
    if written.problem:
        raise LapError(f"{written.problem}; {written.folder} is marked as not verified")
