"""Small training runs with the real `lap train` on this machine: killed and resumed, and on several ranks.

A GPT of two layers on a made-up text, in a temporary folder, with a checkpoint after every step.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lapcli.doctor.checks import REPORT, Finding, fails, passes
from lapcli.runtime.files import write_json
from lapcli.runtime.signals import end_with_parent
from lapcli.training.metrics import last_step_metrics, read_metrics

#: Seconds after which a process is considered to hang; the first step may compile for minutes.
HANG = 900.0
#: More steps than a run makes before its start is noticed, so that it can be killed in between.
STEPS, STEPS_TOGETHER = 100, 5
MOST_DIFFERENCE = 0.01  # of losses in bf16, whose rounding depends on the number of processes
WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "round", "and", "round", "it"]


class Training:
    """A `lap train` in a separate process, with its output in a file."""

    def __init__(self, folder: Path, name: str, command: Sequence[str]) -> None:
        self.run, self._log = folder / "runs" / name, folder / f"{name}.log"
        # The cache in the folder is removed with it.
        environment = {**os.environ, "LAP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            ending = partial(end_with_parent, os.getpid(), signal.SIGKILL)
            words = [sys.executable, "-m", *command]
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, preexec_fn=ending)

    def failure(self) -> str | None:
        """Wait for the end; return why the process failed, or None."""
        try:
            code = self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            return f"it did not end within {HANG:.0f} s"
        finally:
            self.process.kill()  # on Linux its ranks end with it (PDEATHSIG)
            self.process.wait()
        said = self._log.read_text(errors="replace").strip()
        return f"it ended with {code}: {said.rpartition(chr(10))[2]}" if code else None

    def kill_after_steps(self, steps: int) -> str | None:
        """Kill the process with SIGKILL once its metrics have that step; return why that was not possible, or None."""
        while last_step_metrics(self.run / "metrics.jsonl").get("step", 0) < steps:
            if self.process.poll() is not None:
                return self.failure() or "it finished"
            time.sleep(0.005)
        self.process.kill()
        return None if self.process.wait() == -signal.SIGKILL else "it finished"


def train(
    folder: Path, name: str, device: str, steps: int, ranks: int = 1, deterministic: bool = False, batch: int = 8
) -> Training:
    text, recipe = folder / "text.txt", folder / f"{name}.json"  # JSON is YAML
    lines = [" ".join(WORDS[(i * i + j * (i % 5 + 1)) % len(WORDS)] for j in range(12)) for i in range(600)]
    text.write_text("\n".join(lines), encoding="utf-8")
    settings = {"device": device, "deterministic": deterministic, "threads": 1}
    content = {
        "objective": "language_model",
        "model": {"layers": 2, "width": 64, "heads": 4, "context": 64, "laplacian_heads": 2},
        "tokenizer": {"vocab": 300},
        "data": {"train": str(text), "validation": 0.2},
        "train": {"steps": steps, "batch": batch, "micro_batch": 4, **settings},
        "validation": {"every": None, "tokens": 64, "prompts": []},
        "checkpoint": {"every": 1, "keep": 1},
    }
    write_json(recipe, content)
    command = ["lapcli", "train", str(recipe), "--runs-dir", str(folder / "runs"), "--name", name]
    return Training(folder, name, [*command, "--nproc", str(ranks)])


def check_resume(folder: Path, device: str, steps: int = STEPS) -> Finding:
    """Compare a run that was killed and resumed with an uninterrupted one, bit by bit."""
    whole = train(folder, "whole", device, steps, deterministic=True)
    if failure := whole.failure():
        return fails(f"a small training failed: {failure}", REPORT)
    killed = train(folder, "killed", device, steps, deterministic=True)
    if failure := killed.kill_after_steps(3):
        return fails(f"the run was not killed as planned: {failure}", REPORT)
    if failure := train(folder, "killed", device, steps, deterministic=True).failure():
        return fails(f"the killed run does not resume: {failure}", REPORT)
    for file in ("model.safetensors", "optimizer.safetensors"):
        place = Path("checkpoints", f"step-{steps:06d}", file)
        if (whole.run / place).read_bytes() != (killed.run / place).read_bytes():
            return fails(f"a resumed run differs from an uninterrupted one in {place}", REPORT)
    return passes(f"a run of {steps} steps that was killed and resumed has the bits of an uninterrupted one")


def check_ranks(folder: Path, ranks: int, device: str) -> Finding:
    """Train the same global batches on all ranks, which share gradients and optimizer state, and on one."""
    step = "check `nvidia-smi topo -m`, and try NCCL_DEBUG=INFO or NCCL_P2P_DISABLE=1" if device == "cuda" else REPORT
    losses = []
    for name, processes in (("one", 1), ("ranks", ranks)):
        training = train(folder, name, device, STEPS_TOGETHER, processes, batch=8 * ranks)
        if failure := training.failure():
            return fails(f"{processes} processes do not train: {failure}", step, ranks=ranks)
        losses.append([x["loss"] for x in read_metrics(training.run / "metrics.jsonl") if "loss" in x])
    worst = max(abs(one / other - 1) for one, other in zip(*losses, strict=True))
    said = f"losses of {ranks} ranks are those of one within {worst:.1e}, over {STEPS_TOGETHER} steps"
    if worst < MOST_DIFFERENCE:
        return passes(said, ranks=ranks)
    return fails(f"{said}; that is too far", step, ranks=ranks)
