from lapcli.training.metrics import MetricsLog, read_metrics


def test_a_torn_last_line_and_later_steps_are_dropped(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append({"step": step, "loss": 1 / step})
    with log.path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in log.keep_until(3)] == [1, 2, 3]
    log.append({"step": 4, "loss": 9.0})
    assert log.path.read_text().count("\n") == 4
    assert read_metrics(log.path)[-1] == {"step": 4, "loss": 9.0}


def test_no_file_is_no_metrics(tmp_path):
    assert MetricsLog(tmp_path / "metrics.jsonl").keep_until(10) == []
    assert not (tmp_path / "metrics.jsonl").exists()
