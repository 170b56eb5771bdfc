"""The list of runs: what it says of each is what the run's own files say."""

import json

import pytest
from support import tiny_recipe

from lapcli.catalogue.listing import best_validation, list_runs, size_of
from lapcli.runs import open_run, read_run, unlock


@pytest.fixture
def runs(tmp_path):
    """Two runs with a few lines of metrics, one of them written a day later than the other."""
    for name, day, values in (("old-run", 3, [2.5, 2.0, 2.25]), ("new-run", 4, [3.0])):
        run = open_run(tmp_path, name, tiny_recipe(tmp_path / "text.txt"))
        lines = [{"step": 0, "validation_bits_per_byte": 1.0}]  # an untrained model has no checkpoint and is not best
        lines += [{"step": step, "validation_bits_per_byte": value} for step, value in enumerate(values, 1)]
        lines += [{"step": 4, "loss": 1.0}]
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "lo')
        run.update(status="interrupted", step=3, steps=10)
        set_updated(run, f"2026-01-0{day}T00:00:00+0000")
        unlock(run)
    return tmp_path


def set_updated(run, moment):
    file = run.path / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "updated": moment}))


def test_the_newest_comes_first_with_its_best_validation(runs):
    new, old = list_runs(runs)
    assert (new["name"], old["name"]) == ("new-run", "old-run")
    assert old["best"] == {"metric": "validation_bits_per_byte", "value": 2.0, "step": 2}
    known = [old[key] for key in ("kind", "plan", "step", "steps", "status")]
    assert known == ["language_model", "2", 3, 10, "interrupted"]
    assert old["seconds_since"] - new["seconds_since"] == pytest.approx(86400, abs=5)


def test_the_direction_is_the_recipes(runs):
    run = read_run(runs / "old-run")
    lines = [{"step": s, "validation_loss": 1.0 - s, "validation_bits_per_byte": v} for s, v in ((1, 0.5), (2, 0.75))]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_validation(run)["step"] == 1
    run.recipe.__class__ = type("Other", (type(run.recipe),), {"metrics": {"validation_loss": ("nats", "higher")}})
    assert best_validation(run) == {"metric": "validation_loss", "value": 0.0, "step": 1}
    assert best_validation(run, among=[2])["step"] == 2


def test_a_damaged_run_is_listed_as_such(runs):
    (runs / "new-run" / "run.json").write_text("{")
    damaged = next(run for run in list_runs(runs) if run["name"] == "new-run")
    assert damaged["status"] == "damaged"
    assert "run.json is damaged" in damaged["problem"]
    assert damaged["bytes"] == size_of(runs / "new-run") > 0
