"""How a sweep ends: its reports, and the error that its exit code comes from."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lapcli.recipe.chat import STAGES
from lapcli.runtime.errors import Interrupted, LapError
from lapcli.sweep.cells import Sweep
from lapcli.sweep.runner import Outcome, Track


def make_reports(sweep: Sweep, tracks: Sequence[Track], runs_dir: Path, to_stderr: bool) -> int:
    """`lap report` for each `report` of the sweep, on the cells' runs and their chat stages; its exit code."""
    cells = [track.cell.name for track in tracks if not track.cell.is_search]
    names = [name for cell in cells for name in (cell, *(f"{cell}-{stage}" for stage in STAGES))]
    there = [name for name in names if (runs_dir / name / "run.json").exists()]
    for text in sweep.reports if there else ():
        words = ["report", *there, *shlex.split(text), "--runs-dir", str(runs_dir)]
        command = [sys.executable, "-m", "lapcli", *words]
        done = subprocess.run(command, stdout=sys.stderr if to_stderr else None, check=False)
        if done.returncode:
            return done.returncode
    return 0


def failure(outcome: Outcome) -> LapError | None:
    """What the command ends with, if not with success."""
    if outcome.failed:
        count = len(outcome.failed)
        return LapError(f"{count} of {len(outcome.tracks)} cells failed; run the same command to try them again")
    if outcome.interrupted:
        count = len(outcome.interrupted)
        return Interrupted(f"{count} of {len(outcome.tracks)} cells were interrupted; run the same command to go on")
    return None
