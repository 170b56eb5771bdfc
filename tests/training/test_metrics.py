"""`metrics.jsonl` has each step once with its times; a damaged line stops nobody."""

import json

import pytest
from support import tiny_recipe, train_here, write_text

from lapcli import checkpoint
from lapcli.objectives.language_model import LanguageModel
from lapcli.runtime.ranks import World
from lapcli.training.metrics import MetricsLog, StepClock, last_step_metrics, read_metrics, without_times
from lapcli.training.optimizers import Optimizers


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "loss": 1 / step})
    return log


def test_a_torn_last_line_and_later_steps_are_dropped(log):
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4, 5]
    again = MetricsLog(log.path)
    assert [line["step"] for line in again.resume(3, pytest.fail)] == [1, 2, 3]
    again.append({"step": 4, "loss": 9.0})
    assert log.path.read_text().count("\n") == 4
    assert read_metrics(log.path)[-1] == {"step": 4, "loss": 9.0}


def test_a_damaged_line_is_reported_and_skipped(log):
    log.path.write_text(log.path.read_text().replace('"step": 2', '"step: 2'))
    said = []
    assert [line["step"] for line in log.resume(4, said.append)] == [1, 3, 4]
    assert [text.split()[0] for text in said] == [f"{log.path}:2"]
    assert log.path.read_text().count("\n") == 4  # the line stays for whoever wants to mend it


def test_the_last_step_is_found_before_a_long_validation(log):
    log.append({"step": 5, **{f"validation_{n}": 0.5 for n in range(24 * 16)}})
    assert last_step_metrics(log.path) == {"step": 5, "loss": 0.2}


def test_lost_metrics_are_reported(tmp_path):
    said = []
    assert MetricsLog(tmp_path / "metrics.jsonl").resume(0, pytest.fail) == []
    assert MetricsLog(tmp_path / "metrics.jsonl").resume(10, said.append) == []
    assert "step 10" in said[0]
    assert not (tmp_path / "metrics.jsonl").exists()


class VirtualGPU:
    """A clock that moves by what the host does and waits for; kernels are queued, and run when somebody waits."""

    def __init__(self) -> None:
        self.now = self.queued = 0.0

    def wait(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def host(self, seconds: float) -> None:
        self.wait()
        self.now += seconds

    def queue(self, seconds: float) -> None:
        self.queued += seconds


def test_times_add_up_to_the_wall_time(tmp_path, monkeypatch):
    """Ten steps of two micro-batches (1 of reading and 2 of computing each) and an update of 4. The one wait of a step
    is before its update, so a step's time has the update of the step before, and the last update is in no line. The
    first batch of the next step is read before the wait, while the device computes.
    Compiling takes 10,000, a validation 100, a save 1,000."""
    gpu = VirtualGPU()
    calls = iter([10_000.0])

    def timed(owner, name, take):
        inner = getattr(owner, name)

        def call(*arguments, **options):
            take()
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    timed(LanguageModel, "batch", lambda: setattr(gpu, "now", gpu.now + 1))
    timed(LanguageModel, "loss", lambda: gpu.queue(2 + next(calls, 0)))
    timed(Optimizers, "step", lambda: gpu.queue(4))
    timed(World, "means", gpu.wait)  # numbers that all ranks share are waited for
    timed(LanguageModel, "validate", lambda: gpu.host(100))
    timed(checkpoint, "save", lambda: gpu.host(1000))
    monkeypatch.setattr(StepClock, "now", lambda self: gpu.now)
    monkeypatch.setattr(StepClock, "_finish_work", lambda self: gpu.wait())

    run = train_here(tiny_recipe(write_text(tmp_path / "text.txt")), tmp_path / "runs")
    lines = read_metrics(run.metrics)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert steps[0]["seconds_first_step"] == 10_007
    assert not {"seconds", "tokens_per_second"} & steps[0].keys()
    assert [line["seconds"] for line in steps[1:]] == [10] * 8 + [9]
    assert [line["tokens_per_second"] for line in steps[1:-1]] == [8 * 32 / 10] * 8
    # Saved after steps 3, 6, 9 and 10, validated at 0, 4, 8 and 10; the line after says so.
    assert [line["step"] for line in lines if line.get("seconds_saving") == 1000] == [4, 7, 10, 10]
    assert [line["step"] for line in lines if line.get("seconds_validating") == 100] == [0, 4, 8, 10]
    logged = sum(value for line in lines for name, value in line.items() if name.startswith("seconds"))
    assert logged + 4 == gpu.now == 10_010 + 9 * 10 + 4 * 100 + 4 * 1000


def test_times_do_not_enter_the_summary(tmp_path):
    """What a run reports is the same whether or not it was interrupted."""
    run = train_here(tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 1}), tmp_path / "runs")
    summary = json.loads((run.path / "summary.json").read_text())
    assert set(summary["end"]) == {"validation_loss", "validation_bits_per_byte"}
    last = read_metrics(run.metrics)[-1]
    assert {"seconds_validating", "seconds_saving"} < last.keys()
    assert without_times(last) == {"step": 1, **summary["end"]}
