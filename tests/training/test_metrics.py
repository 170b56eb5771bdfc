"""`metrics.jsonl` contains each step once with its timings; a damaged line is not fatal."""

import pytest

from lapcli.training.metrics import MetricsLog, last_step_metrics, read_metrics


@pytest.fixture
def log(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "loss": 1 / step})
    return log


def test_a_truncated_last_line_and_later_steps_are_dropped(log):
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


def test_the_last_step_is_written_before_a_long_validation(log):
    log.append({"step": 5, **{f"validation_{n}": 0.5 for n in range(24 * 16)}})
    assert last_step_metrics(log.path) == {"step": 5, "loss": 0.2}
