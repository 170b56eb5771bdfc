"""Tables over run directories with known numbers: means, deviations, gaps, and runs that must not be averaged."""

import csv
import io
import json
import shutil
import statistics
import sys

import numpy as np
import pytest
from report_support import write_analysis, write_row, write_run
from scipy import stats
from support import ROOT, run_main, run_process

TOP1 = {0: (0.80, 0.82, 0.84), 2: (0.85, 0.86, 0.87), 4: (0.90, 0.90, 0.93)}


@pytest.fixture
def runs(tmp_path):
    for heads, values in TOP1.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, f"digits_{heads}L_{seed}", heads=heads, seed=seed, scores={"top1": value})
    return tmp_path


def report(capsys, runs, *arguments):
    return run_main(capsys, "report", "--runs-dir", str(runs), *arguments)


def tables(capsys, runs, *arguments):
    code, out, err = report(capsys, runs, "--format", "json", *arguments)
    assert code == 0, err
    return json.loads(out)


def cells(table, column="top1"):
    return {row["row"]: row["cells"][column] for row in table["rows"]}


def test_means_deviations_and_pairs_match_numpy_and_scipy(capsys, runs):
    (table,) = tables(capsys, runs)
    for heads, cell in cells(table).items():
        values = 100 * np.array(TOP1[int(heads)])
        low, high = stats.t.interval(0.95, 2, values.mean(), stats.sem(values))
        assert cell["mean"] == pytest.approx(values.mean())
        assert cell["std"] == pytest.approx(statistics.stdev(values))
        assert cell["interval"] == pytest.approx([low, high])
        assert cell["n"] == 3
        if heads != "0":
            test = stats.ttest_rel(values, 100 * np.array(TOP1[0]))
            assert cell["paired"]["p"] == pytest.approx(test.pvalue)
            assert cell["paired"]["interval"] == pytest.approx(list(test.confidence_interval(0.95)))
    assert [cell["mark"] for cell in cells(table).values()] == [None, "second", "best"]
    rows = list(csv.DictReader(io.StringIO(report(capsys, runs, "--format", "csv")[1])))
    assert [float(row["mean"]) for row in rows] == pytest.approx([82, 86, 91])


def test_a_gap_is_never_a_zero(capsys, runs):
    shutil.rmtree(runs / "digits_2L_1")
    (runs / "digits_4L_0" / "results.jsonl").write_text("")
    write_run(runs, "digits_3L_0", heads=3)
    write_run(runs, "digits_1L_0", heads=1, scores={"top1": float("nan")})
    (table,) = tables(capsys, runs)
    found = cells(table)
    assert found["2"]["n"] == 2
    assert (found["3"]["mean"], found["3"]["n"], found["1"]["mean"]) == (None, 0, None)
    assert found["4"]["mean"] == pytest.approx(91.5)
    rows = list(csv.DictReader(io.StringIO(report(capsys, runs, "--format", "csv")[1])))
    assert {row["row"]: row["mean"] for row in rows}["3"] == ""


@pytest.mark.parametrize("status", ["interrupted", "running"])
def test_an_unfinished_run_is_a_gap_with_a_note(capsys, runs, status):
    write_run(runs, "late", heads=2, seed=3, scores={"top1": 0.1}, status=status)
    (table,) = tables(capsys, runs)
    assert cells(table)["2"]["n"] == 3
    assert f"late is {status} at step 40 of 100" in " ".join(report(capsys, runs)[2].split())


@pytest.mark.parametrize("key", ["optimizer.lr=0.5", "model.drop_path=0.2"])
def test_different_recipes_are_not_averaged(capsys, runs, key):
    write_run(runs, "other", heads=2, seed=3, change=[key], scores={"top1": 0.1})
    found = tables(capsys, runs)
    assert len({table["title"] for table in found}) == len(found) == 2
    assert sorted(cells(table)["2"]["n"] for table in found) == [1, 3]
    assert key.split("=")[0] in report(capsys, runs)[2]


def test_resumable_keys_and_unread_data_do_not_split_a_table(capsys, runs):
    change = ["train.micro_batch=8", "train.threads=2", "checkpoint.every=7"]
    write_run(runs, "other", heads=2, seed=3, change=change, scores={"top1": 0.86})
    path = write_run(runs, "stopped", heads=2, seed=4, status="interrupted")
    info = json.loads((path / "run.json").read_text())
    del info["data_sha256"]
    (path / "run.json").write_text(json.dumps(info))
    (table,) = tables(capsys, runs)
    assert cells(table)["2"]["n"] == 4


def test_two_notations_of_one_plan_are_one_row_and_operators_are_rows(capsys, runs):
    write_run(runs, "list", heads=[2, 2, 2, 2], seed=3, scores={"top1": 0.86})
    write_run(runs, "mix", heads=0, change=['model.operators={"mix": 2}'], scores={"top1": 0.5})
    (table,) = tables(capsys, runs)
    assert cells(table)["2"]["n"] == 4
    assert list(cells(table))[:3] == ["0", "2", "4"]
    assert "mix" in list(cells(table))[3]


def test_a_run_without_any_number_is_a_gap(capsys, tmp_path):
    write_run(tmp_path, "only", "vit_digits", status="interrupted")
    code, out, err = run_main(capsys, "report", "--runs-dir", str(tmp_path))
    assert (code, "only is interrupted" in err) == (0, True), out


def test_a_duplicate_seed_counts_once(capsys, runs):
    """The newer run, in every time zone: 9:00 in Tokyo is before 5:00 in Cairo."""
    for name, moment, value in (("a", "2027-01-01T09:00:00+0900", 0.1), ("b", "2027-01-01T05:00:00+0200", 0.9)):
        path = write_run(runs, name, heads=2, seed=1, scores={"top1": value})
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**info, "updated": moment}))
    (table,) = tables(capsys, runs)
    assert cells(table)["2"]["mean"] == pytest.approx(100 * (0.85 + 0.9 + 0.87) / 3)


def test_measurements_under_other_conditions_are_separate_columns(capsys, runs):
    path = runs / "digits_2L_0"
    known = {"unit": "fraction", "direction": "higher"}
    write_row(path, "top1", "top1", 0.1, limit=100, **known)
    write_row(path, "top1", "top1", 0.2, conditions={"crop": 2}, **known)
    write_row(path, "top1", "top1", 0.3, data="elsewhere", data_sha256="e" * 64, **known)
    write_analysis(path, "spectrum", {2: {"k_0.99": 5.0}, 3: {"k_0.99": 30.0}})
    write_analysis(runs / "digits_2L_1", "spectrum", {3: {"k_0.99": 10.0}}, limit=4)
    (table,) = tables(capsys, runs)
    assert [column["name"] for column in table["columns"]] == ["top1"]
    assert cells(table)["2"]["mean"] == pytest.approx(86.0)
    (table,) = tables(capsys, runs, "--columns", "top1 [limit 100],top1 [crop 2]")
    assert [cell["mean"] for cell in table["rows"][1]["cells"].values()] == pytest.approx([10, 20])
    (table,) = tables(capsys, runs, "--columns", "k_0.99,spectrum.k_0.99 [limit 4]")
    assert cells(table, "spectrum.k_0.99")["2"]["mean"] == 30.0
    assert cells(table, "spectrum.k_0.99 [limit 4]")["2"]["mean"] == 10.0


def test_unit_and_direction_come_from_the_results(capsys, tmp_path):
    """Perplexity is no percentage, and its best is the lowest; a number without a direction has no best."""
    for heads, value in ((0, 40.0), (2, 30.0)):
        path = write_run(tmp_path, str(heads), "quickstart", heads=heads, validation={"loss": 1.0 + heads})
        write_row(path, "lambada", "perplexity", value, direction="lower", protocol="harness")
        write_row(path, "lambada", "acc", value / 100, unit="fraction", direction="higher", protocol="harness")
        write_row(path, "odd", "odd", value, protocol="harness")
    (table,) = tables(capsys, tmp_path, "--columns", "lambada,lambada.acc,odd,validation_loss")
    marks = {name: cell["mark"] for name, cell in table["rows"][1]["cells"].items()}
    assert marks == {"lambada": "best", "lambada.acc": "second", "odd": None, "validation_loss": "second"}
    assert cells(table, "lambada")["2"]["mean"] == 30.0
    assert cells(table, "lambada.acc")["2"]["mean"] == 30.0
    assert {column["name"]: column["unit"] for column in table["columns"]}["lambada"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing*"], "nothing*"),
        (["--rows", "model.laplacian_head"], "model.laplacian_heads"),
        (["--rows", "seed"], "--rows"),
        (["--columns", "top7"], "top7"),
        (["--paper", "table1", "--columns", "top1"], "--columns"),
    ],
)
def test_usage_errors(capsys, runs, arguments, named):
    code, out, err = report(capsys, runs, *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


def test_a_report_needs_no_torch(runs):
    """The import takes seconds, and a laptop that only reads results may not have torch."""
    code = "import sys, atexit\natexit.register(lambda: print('torch' in sys.modules))\n"
    code += "from lapcli.cli import main\nmain()"
    arguments = ["report", "--runs-dir", str(runs), "--format", "html"]
    done = run_process([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "False"), done.stderr
    assert (runs / "report.html").is_file()
