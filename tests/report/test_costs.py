"""What operators cost beside what they score, on runs with known times."""

import json
import statistics

import pytest
from report_support import write_run
from support import run_main, tiny_recipe, train_here, write_text

from lapcli.report.assemble import report_on
from lapcli.report.figures import draw_all

#: Rows of the table: what the recipe says, and what its operator learns in 4 layers of 4 heads of 16 and width 64.
OPERATORS = {
    "none": ({}, 0),
    "laplacian": ({"laplacian": 2}, 0),
    "mix": ({"mix": {"heads": "all", "learn": ["alpha"]}}, 4 * 4),
    "shaped": ({"shaped": 2}, 4 * 2 * 3),
    "gate": ({"gate": 1}, 4 * 64),
}


def write_timed(runs, name, seconds_a_step, seed=0, **changes):
    """Four steps and validations at 0, 2 and 4; top-1 goes 0.1, 0.5, 0.9."""
    operators, _ = OPERATORS[changes.pop("operators", "none")]
    path = write_run(runs, name, seed=seed, change=[f"model.operators={json.dumps(operators)}"])
    lines = [{"step": 0, "validation_loss": 2.0, "validation_top1": 0.1}]
    for step in (1, 2, 3, 4):
        key = "seconds_first_step" if step == 1 else "seconds"
        rate = {} if step == 1 else {"images_per_second": 64 / seconds_a_step}
        lines.append({"step": step, "loss": 1.0, "lr": 0.1, key: seconds_a_step, **rate})
        if step in (2, 4):
            lines.append({"step": step, "validation_loss": 2.0 - step / 4, "validation_top1": 0.1 + 0.2 * step})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    info = json.loads((path / "run.json").read_text())
    told = {"host": "here", "threads": 1, "peak_memory": 250_000_000, "flops_per_step": 3e9, **changes}
    (path / "run.json").write_text(json.dumps({**info, **told}))
    end = {"validation_loss": 1.0, "validation_top1": 0.9}
    (path / "summary.json").write_text(json.dumps({"end": end}))
    return path


def told(capsys, runs, *arguments):
    code, out, err = run_main(capsys, "report", "--runs-dir", str(runs), "--format", "json", *arguments)
    assert code == 0, err
    (table,) = json.loads(out)
    return {row["row"]: {name: cell["mean"] for name, cell in row["cells"].items()} for row in table["rows"]}, err


def test_costs_stand_beside_the_scores_of_operators(capsys, tmp_path):
    for name in OPERATORS:
        write_timed(tmp_path, name, 0.5, operators=name)
    rows, _ = told(capsys, tmp_path)
    labels = dict(zip(OPERATORS, ("0", "2", "4 mix (learn alpha)", "2 shaped", "1 gate"), strict=True))
    for name, (_, learnt) in OPERATORS.items():
        cells = rows[labels[name]]
        assert cells["cost.added_parameters"] == learnt
        assert cells["cost.images_per_second"] == pytest.approx(128)
        assert cells["cost.peak_memory"] == pytest.approx(250)  # megabytes
        assert cells["cost.flops_per_step"] == pytest.approx(3)
    assert rows["0"]["cost.added_flops"] == 0
    assert rows["2"]["cost.added_flops"] == 4 * 2 * 16  # one subtraction for each number of the Laplacian heads
    code, out, _ = run_main(capsys, "report", "--runs-dir", str(tmp_path), "--format", "markdown")
    assert code == 0
    header = next(line for line in out.splitlines() if line.startswith("|"))
    assert "| added parameters |" in header
    assert "| peak memory (MB) |" in header


def test_without_operators_costs_are_shown_when_asked_for(capsys, tmp_path):
    for heads in (0, 2):
        write_run(tmp_path, f"run-{heads}", heads=heads, scores={"top1": 0.8})
    rows, _ = told(capsys, tmp_path)
    assert set(rows["0"]) == {"top1"}
    rows, _ = told(capsys, tmp_path, "--columns", "top1,costs")
    assert rows["2"]["cost.added_parameters"] == 0
    assert "cost.peak_memory" not in rows["2"]  # a run of version 0.1 does not say


def test_a_run_keeps_what_it_took(tmp_path, shared_cache, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    run = train_here(tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 2}), tmp_path)
    assert run.info["peak_memory"] > 10_000_000
    # The tiny GPT: an embedding and a head of 300 x 32, two layers of 12 x 32 x 32.
    assert run.info["parameters"] == 2 * 300 * 32 + 2 * 12 * 32 * 32
    assert run.info["flops_per_step"] > 6 * 2 * 12 * 32 * 32 * 8 * 32


def test_rows_of_other_operators_stand_beside_the_numbers_of_laplacian_heads(tmp_path):
    """Not at a number of heads that no layer has."""
    for name in ("none", "laplacian", "mix", "shaped"):
        write_timed(tmp_path, name, 0.5, operators=name)
    charts = draw_all(report_on([], tmp_path).grids)
    chart = next(chart for chart in charts if chart.name.endswith("-by-heads"))
    assert chart.x_ticks == [0, 2, 5, 6]
    assert sorted(chart.x_names.items()) == [(5, "2 shaped"), (6, "4 mix (learn alpha)")]
    assert [x for line in chart.lines for x, _ in line.points] == [0, 2]


def test_every_mean_over_seeds_is_drawn_with_its_deviation(tmp_path):
    """The baseline too, where it is the only row without other operators and has no band beside it."""
    for heads, scores in (("none", (0.70, 0.80)), ("shaped", (0.75, 0.85))):
        for seed, score in enumerate(scores):
            operators, _ = OPERATORS[heads]
            change = [f"model.operators={json.dumps(operators)}"]
            write_run(tmp_path, f"{heads}-{seed}", seed=seed, change=change, scores={"top1": score})
    charts = draw_all(report_on([], tmp_path).grids)
    chart = next(chart for chart in charts if chart.name.endswith("-by-heads"))
    _, axes = chart._draw((4.0, 3.0), legend=True)
    bars = [segment for drawn in axes.collections for segment in getattr(drawn, "get_segments", list)()]
    spans = {float(bar[0][0]): (float(bar[:, 1].min()), float(bar[:, 1].max())) for bar in bars}
    deviation = 100 * statistics.stdev((0.70, 0.80))
    assert spans[0.0] == pytest.approx((75 - deviation, 75 + deviation))
    assert spans[chart.x_ticks[1]] == pytest.approx((80 - deviation, 80 + deviation))


def test_runs_with_another_order_of_operators_are_not_averaged(capsys, tmp_path):
    """Nor is one left out as the repetition of the other."""
    for seed, operators in enumerate([{"laplacian": 1, "exclusive": 2}, {"exclusive": 2, "laplacian": 1}]):
        change = [f"model.operators={json.dumps(operators)}"]
        write_run(tmp_path, f"run{seed}", seed=seed, change=change, scores={"top1": 0.5})
    arguments = ("--rows", "optimizer.lr", "--columns", "top1", "--format", "json")
    code, out, err = run_main(capsys, "report", "--runs-dir", str(tmp_path), *arguments)
    assert code == 0, err
    assert [row["cells"]["top1"]["n"] for table in json.loads(out) for row in table["rows"]] == [1, 1]
