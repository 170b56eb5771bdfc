"""Writes a sweep as a SLURM array script: one task for each cell, saved and requeued at its time limit."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lapcli.experiments.cells import WORK, Cell

_SECONDS_TO_SAVE = 300


def array_script(
    cells: Sequence[Cell], arguments: Sequence[str], runs_dir: Path, jobs: int | None, gpus: int = 1
) -> str:
    """Return the script. `arguments` are those of `lap sweep` for all cells; `jobs`: tasks at a time; `gpus`: of each
    task."""
    title = shlex.quote(cells[0].name)
    at_once = f"%{jobs}" if jobs else ""
    width = len(str(len(cells) - 1))
    listed = "\n".join(f"  {shlex.quote(cell.name)}  # {number:>{width}}" for number, cell in enumerate(cells))
    uses_gpus = any(cell.loaded.train.device != "cpu" for cell in cells)
    asked = f"#SBATCH --gpus-per-node={gpus}\n" if uses_gpus else ""
    logs = (runs_dir / WORK).absolute()
    command = " ".join(map(shlex.quote, [sys.executable, "-m", "lapcli", "sweep", *arguments]))
    # --signal=B: the batch shell gets TERM, and its trap passes it on; without B only job steps do, and there are none.
    # The sweep runs in the background, because bash runs a trap only after a foreground command has ended.
    # --open-mode=append: a requeued task continues its log.
    return f"""#!/bin/bash
# {len(cells)} cells as a SLURM array; submit it with `sbatch FILE`. The lines up to the empty line are yours to change.
#SBATCH --job-name={title}
#SBATCH --array=0-{len(cells) - 1}{at_once}
#SBATCH --nodes=1
{asked}#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={logs}/slurm-%A_%a.log
#SBATCH --signal=B:TERM@{_SECONDS_TO_SAVE}

cells=(
{listed}
)
cell=${{cells[$SLURM_ARRAY_TASK_ID]}}
cd {shlex.quote(str(Path.cwd()))} || exit 1

# A finished cell is skipped, an interrupted one is resumed. Before the time is up SLURM sends TERM, and the cell saves.
{command} --only "$cell" &
sweep=$!
trap 'kill -TERM "$sweep"' TERM
wait "$sweep"
code=$?
while kill -0 "$sweep" 2>/dev/null; do  # the trap ended the first wait
  wait "$sweep"
  code=$?
done
if [ "$code" = 75 ]; then  # saved, and not finished: once more
  scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
exit "$code"
"""
