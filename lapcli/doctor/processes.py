"""Several processes on this machine: how fast they communicate, whether they stay equal, and how they end.

Signals are sent to the real `lap train`, with its launcher and its ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lapcli.doctor.checks import REPORT, Check, Finding, fails, passes, warns
from lapcli.doctor.trials import TRIAL_TIMEOUT, TrialOutcome, TrialTraining, recipe_of, start_trial
from lapcli.runtime.errors import ExitCode
from lapcli.runtime.files import write_json
from lapcli.training import checkpoint

Start = Callable[[TrialTraining], TrialOutcome]
EXCHANGED = {"cuda": 512 * 2**20, "cpu": 16 * 2**20}
#: Bytes a second below which averaging gradients takes longer than it should: PCIe 4 reaches 20 GB/s.
LEAST_BANDWIDTH = {"cuda": 5e9, "cpu": 1e7}
#: Steps of the run that is interrupted (more than it can finish before the signal), and of the one that restarts.
MANY_STEPS, RESTARTED_STEPS = 100_000, 200


def check_equal_ranks(
    folder: Path, ranks: int, device: str, start: Start = start_trial, trial: TrialTraining | None = None
) -> tuple[Finding, Finding]:
    """Measure the bandwidth of a sum over the ranks, and whether all have the same weights after five steps."""
    size = EXCHANGED[device]
    trial = trial or TrialTraining(str(folder), "ranks", 5, device, ranks=ranks, exchange_bytes=size)
    outcome = start(trial)
    if failure := outcome.failure():
        step = (
            "check `nvidia-smi topo -m`, and try NCCL_DEBUG=INFO or NCCL_P2P_DISABLE=1" if device == "cuda" else REPORT
        )
        failed = fails(f"{ranks} processes do not train together: {failure}", step, exit_codes=outcome.codes)
        return failed, failed
    return _bandwidth(outcome, size, ranks, device), equality([seen["weights"] for seen in outcome.seen])


def _bandwidth(outcome: TrialOutcome, size: int, ranks: int, device: str) -> Finding:
    seconds = max(seen["exchange_seconds"] for seen in outcome.seen)
    # A ring sends each byte 2 (n - 1) / n times.
    rate = 2 * (ranks - 1) / ranks * size / seconds
    text = f"{'NCCL' if device == 'cuda' else 'gloo'} sums at {rate / 1e9:.3g} GB/s over {ranks} processes"
    if rate >= LEAST_BANDWIDTH[device]:
        return passes(text, bytes_per_second=rate)
    return warns(
        text, "check `nvidia-smi topo -m`; averaging gradients will cost a part of each step", bytes_per_second=rate
    )


def equality(hashes: Sequence[str]) -> Finding:
    others = [rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]]
    if others:
        return fails(f"after five steps rank {others[0]} has other weights than rank 0", REPORT, weights=list(hashes))
    return passes(f"{len(hashes)} ranks have the same weights after five steps", weights=hashes[0])


class Training:
    """`lap train` of a trial's recipe in processes of its own; tests may pass another `command`."""

    def __init__(self, trial: TrialTraining, options: Sequence[str], command: Sequence[str] | None = None) -> None:
        self.trial = trial
        recipe = Path(trial.folder) / f"{trial.name}.json"  # JSON is YAML
        write_json(recipe, recipe_of(trial))
        lap = [sys.executable, "-m", "lapcli", "train", str(recipe), "--runs-dir", str(trial.run.parent)]
        self.log = Path(trial.folder) / f"{trial.name}.log"
        environment = {**os.environ, "LAP_CACHE": str(Path(trial.folder) / "cache"), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            arguments = [*lap, "--name", trial.name, *options] if command is None else command
            self.process = subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait_for_step(self, step: int, hang: float = TRIAL_TIMEOUT) -> str | None:
        """Wait until the metrics have that step; return why they do not, or None."""
        metrics, deadline = self.trial.run / "metrics.jsonl", time.monotonic() + hang
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > step):
            if self.process.poll() is not None:
                return f"`lap train` ended with {self.process.returncode}: {self.last_line()}"
            if time.monotonic() > deadline:
                return "`lap train` hangs"
            time.sleep(0.02)
        return None

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def exit_code(self, hang: float = TRIAL_TIMEOUT) -> int | None:
        """Wait for the exit code; None if the process did not end in time."""
        try:
            return self.process.wait(hang)
        except subprocess.TimeoutExpired:
            return None

    def ranks(self) -> list[int]:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
        pairs = [tuple(map(int, row.split())) for row in listed.splitlines()]
        return sorted(pid for pid, parent in pairs if parent == self.process.pid)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # on Linux its ranks end with it (PDEATHSIG)
        self.process.wait()


def check_sigterm(
    folder: Path, ranks: int, device: str, command: Sequence[str] | None = None, hang: float = TRIAL_TIMEOUT
) -> Finding:
    """Check that SIGTERM to a run gives exit code 75 and a complete checkpoint of the step that it stopped at."""
    trial = TrialTraining(str(folder), "interrupted", MANY_STEPS, device, ranks=ranks)
    training = Training(trial, ["--nproc", str(ranks)], command)
    try:
        if failure := training.wait_for_step(3, hang):
            return fails(failure, REPORT)
        training.process.terminate()
        code = training.exit_code(hang)
    finally:
        training.end()
    if code != ExitCode.INTERRUPTED:
        ended = "it does not end" if code is None else f"it ends with {code}"
        return fails(f"after SIGTERM {ended} instead of {int(ExitCode.INTERRUPTED)}", REPORT, exit_code=code)
    damage: list[str] = []
    saved = checkpoint.newest(trial.checkpoints, damage.append)
    step = json.loads((trial.run / "run.json").read_text())["step"]
    if saved is None or damage or saved.step != step:
        problem = "; ".join(damage) or f"the newest is of step {saved and saved.step}, not {step}"
        return fails(f"after SIGTERM there is no complete checkpoint: {problem}", REPORT, exit_code=code)
    return passes(f"exit code 75 and a complete checkpoint of step {step}", exit_code=code, step=step)


def check_restart(
    folder: Path,
    ranks: int,
    device: str,
    restarts: int = 1,
    command: Sequence[str] | None = None,
    hang: float = TRIAL_TIMEOUT,
) -> Finding:
    """Check that a run whose rank is killed restarts from its last checkpoint and finishes."""
    trial = TrialTraining(str(folder), "restarted", RESTARTED_STEPS, device, ranks=ranks)
    training = Training(trial, ["--nproc", str(ranks), "--max-restarts", str(restarts)], command)
    try:
        if failure := training.wait_for_step(5, hang):
            return fails(failure, REPORT)
        os.kill(training.ranks()[-1], signal.SIGKILL)
        code = training.exit_code(hang)
    finally:
        training.end()
    if code:
        return fails(
            f"after the death of a rank the run ended with {code}: {training.last_line()}", REPORT, exit_code=code
        )
    info = json.loads((trial.run / "run.json").read_text())
    if code is None or info["step"] != RESTARTED_STEPS:
        return fails("after the death of a rank the run does not finish", REPORT, exit_code=code)
    return passes(f"a run of {ranks} processes lost one and finished its {RESTARTED_STEPS} steps", step=info["step"])


def process_checks(folder: Path, ranks: int, device: str) -> list[Check]:
    results: list[tuple[Finding, Finding]] = []

    def together(which: int) -> Finding:
        if not results:
            results.append(check_equal_ranks(folder, ranks, device))
        return results[0][which]

    named: dict[str, Callable[[], Finding]] = {
        "bandwidth": lambda: together(0),
        "equal weights": lambda: together(1),
        "SIGTERM": lambda: check_sigterm(folder, ranks, device),
        "a killed rank": lambda: check_restart(folder, ranks, device),
    }
    return [Check("processes", name, run) for name, run in named.items()]
