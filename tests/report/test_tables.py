"""Tables over run directories with known numbers: means, deviations, gaps, and runs that must not be averaged."""

import csv
import io
import json
import re
import shutil
import sys

import pytest
from report_support import weights_of, write_analysis, write_evaluation, write_run
from support import ROOT, run_main, run_process

from lapcli.report.collect import collect
from lapcli.report.figures import experiments_of
from lapcli.report.grouping import HEADS, group
from lapcli.report.reproduce import analysis_commands

TOP1 = {0: (0.80, 0.82, 0.84), 2: (0.85, 0.86, 0.87), 4: (0.90, 0.90, 0.93)}


@pytest.fixture
def runs(tmp_path):
    for heads, values in TOP1.items():
        for seed, value in enumerate(values):
            write_run(tmp_path, f"digits_{heads}L_{seed}", heads=heads, seed=seed, scores={"top1": value})
    return tmp_path


def report(capsys, runs, *arguments):
    return run_main(capsys, "report", "--runs-dir", str(runs), *arguments)


def told(capsys, runs, *arguments):
    code, out, err = report(capsys, runs, "--format", "json", *arguments)
    assert code == 0, err
    return json.loads(out)


def test_means_deviations_and_n(capsys, runs):
    (table,) = told(capsys, runs)
    cells = {row["row"]: row["cells"]["top1"] for row in table["rows"]}
    assert [cells[row]["mean"] for row in "024"] == pytest.approx([82.0, 86.0, 91.0])
    assert [cells[row]["std"] for row in "024"] == pytest.approx([2.0, 1.0, 3**0.5])  # by hand, n - 1
    assert {cell["n"] for cell in cells.values()} == {3}
    assert (table["ddof"], table["seeds"], table["baseline"]) == (1, ["0", "1", "2"], "0")
    assert [cells[row]["mark"] for row in "024"] == [None, "second", "best"]
    # Differences to the baseline: 5, 4, 3 and 10, 8, 9.
    assert cells["2"]["paired"]["difference"] == pytest.approx(4.0)
    assert cells["4"]["paired"]["difference"] == pytest.approx(9.0)
    assert cells["0"]["paired"] is None


def test_ddof_0_divides_by_n(capsys, runs):
    (table,) = told(capsys, runs, "--ddof", "0")
    assert table["rows"][0]["cells"]["top1"]["std"] == pytest.approx((8 / 3) ** 0.5)
    assert "ddof 0" in table["notes"][0]


def test_best_is_another_column_of_numbers_and_a_gap_where_none_was_kept(capsys, tmp_path):
    kept = {"end": {"validation_top1": 0.8}, "best": {"validation_top1": 0.9}, "best_step": 50}
    (write_run(tmp_path, "kept", heads=0) / "summary.json").write_text(json.dumps(kept))
    write_run(tmp_path, "without", heads=2, scores={"top1": 0.7})
    for which, expected in (("last", {"0": 80.0, "2": 70.0}), ("best", {"0": 90.0, "2": None})):
        code, out, err = report(
            capsys,
            tmp_path,
            "--checkpoint",
            which,
            "--columns",
            "top1",
            "--rows",
            "model.laplacian_heads",
            "--format",
            "json",
        )
        (table,) = json.loads(out)
        assert code == 0
        assert {row["row"]: row["cells"]["top1"]["mean"] for row in table["rows"]} == expected
        assert ("without: its kind of training keeps no best checkpoint" in err) == (which == "best")


def test_a_gap_is_never_a_zero(capsys, runs):
    shutil.rmtree(runs / "digits_2L_1" / "eval")
    for seed in range(3):
        shutil.rmtree(runs / f"digits_4L_{seed}" / "eval")
    code, out, err = report(capsys, runs, "--columns", "top1")
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if re.match(r"[024] ", line)}
    assert "86.00 ± 1.41 (2)" in lines["2"]
    assert lines["4"].split() == ["4", "-"]
    assert "row 4, top-1 (%): no score" in err
    assert "row 2, top-1 (%): no score of seed 1" in err
    (table,) = told(capsys, runs, "--columns", "top1")
    empty = table["rows"][2]["cells"]["top1"]
    assert (empty["mean"], empty["std"], empty["n"]) == (None, None, 0)
    rows = list(csv.DictReader(io.StringIO(report(capsys, runs, "--columns", "top1", "--format", "csv")[1])))
    assert [(row["mean"], row["n"]) for row in rows if row["row"] == "4"] == [("", "0")]
    assert report(capsys, runs, "--columns", "top1", "--strict")[0] == 1


def test_strict_passes_without_gaps(capsys, runs):
    assert report(capsys, runs, "--strict")[0] == 0


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_unfinished_run_is_a_gap(capsys, runs, status):
    write_run(runs, "more", heads=4, seed=3, scores={"top1": 0.1}, status=status)
    code, out, err = report(capsys, runs, "--strict")
    assert code == 1
    assert "91.00 ± 1.73 (3)" in out
    assert f"more is {status} at step 40 of 100" in err


def test_recipes_that_differ_are_not_averaged(capsys, runs):
    write_run(runs, "other", heads=2, seed=3, change=["optimizer.lr=1e-3"], scores={"top1": 0.10})
    tables = told(capsys, runs)
    assert len(tables) == 2
    rows = {row["row"]: row["cells"]["top1"] for row in tables[0]["rows"]}
    assert (rows["2"]["mean"], rows["2"]["n"]) == (pytest.approx(86.0), 3)
    _, out, err = report(capsys, runs)
    assert "learning rate 0.001" in out
    assert re.search(r"not averaged together, because they differ in optimizer.lr: 0.002, 0.001", err)


def test_other_data_is_not_averaged_either(capsys, runs):
    path = write_run(runs, "other", heads=2, seed=3, scores={"top1": 0.10})
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "data_sha256": "0" * 64}))
    assert len(told(capsys, runs)) == 2


def test_tables_that_differ_in_data_and_in_a_key_name_both(capsys, runs):
    """Two data sets at one path, each with two rates."""
    for name, heads, rate, data in (("x", 0, "1e-3", "a"), ("y", 0, "1e-3", "b"), ("z", 0, "2e-3", "b")):
        path = write_run(runs, name, heads=heads, change=[f"optimizer.lr={rate}"], scores={"top1": 0.5})
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**info, "data_sha256": data * 64}))
    titles = [table["title"] for table in told(capsys, runs)]
    assert len(set(titles)) == len(titles) == 4
    assert sum("learning rate 0.001, data sha256 aaaaaaaaaaaaaaaa" in title for title in titles) == 1
    assert sum("learning rate 0.001, data sha256 bbbbbbbbbbbbbbbb" in title for title in titles) == 1
    assert sum("learning rate 0.002, data sha256 bbbbbbbbbbbbbbbb" in title for title in titles) == 1
    _, _, err = report(capsys, runs)
    assert re.search(r"differ in data sha256: \w+, a{16}, b{16}; optimizer.lr: 0.002, 0.001", err)


def test_no_two_tables_share_a_title(capsys, tmp_path):
    """Whatever tells them apart: a fourth key, the end of a long value, or nothing but the data."""
    first = ["optimizer.lr=1e-3", "optimizer.weight_decay=0.1", "train.batch=64", "train.micro_batch=64"]
    write_run(tmp_path, "a", change=first)
    write_run(tmp_path, "b", change=[*first, "schedule.final_lr=1e-5"])
    write_run(tmp_path, "c")
    path = write_run(tmp_path, "d")
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "data_sha256": "0" * 64}))
    for name in ("e", "f"):
        write_run(tmp_path, name, "quickstart", change=[f"tokenizer.file={json.dumps('long ' * 20 + name)}"])
    titles = [table["title"] for table in told(capsys, tmp_path)]
    assert len(set(titles)) == len(titles) == 6
    drawn = [experiment.title for experiment in experiments_of(group(collect([], tmp_path).runs, [HEADS], []))]
    assert len(set(drawn)) == 6


def test_keys_that_a_resume_may_change_do_not_split_a_table(capsys, runs):
    """They change how a run is computed, not what: a run that ran out of memory has another micro-batch."""
    change = ["train.micro_batch=16", "checkpoint.every=7", "validation.every=7"]
    write_run(runs, "resumed", heads=2, seed=3, change=change, scores={"top1": 0.86})
    (table,) = told(capsys, runs)
    assert {row["row"]: row["cells"]["top1"]["n"] for row in table["rows"]}["2"] == 4


def test_a_run_that_was_stopped_before_it_read_its_data_is_a_gap_of_its_grid(capsys, runs):
    path = write_run(runs, "stopped", heads=2, seed=3, status="interrupted")
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({key: info[key] for key in info if not key.startswith("data")}))
    (table,) = told(capsys, runs, "--columns", "top1")
    assert table["seeds"] == ["0", "1", "2", "3"]
    assert {row["row"]: row["cells"]["top1"]["missing_seeds"] for row in table["rows"]}["2"] == ["3"]


def test_scores_of_other_weights_are_left_out(capsys, runs):
    (path,) = (runs / "digits_4L_1" / "eval").iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "weights_sha256": "00"}))
    code, out, err = report(capsys, runs, "--format", "json")
    assert code == 0
    (table,) = json.loads(out)
    assert [row["cells"]["top1"]["n"] for row in table["rows"]] == [3, 3, 2]
    assert f"digits_4L_1: {path.name} was measured on other weights" in err


def test_a_damaged_run_json_is_named(capsys, runs):
    content = '{"format": 3, "objective": "classification", "status": "finished", "step": "x", "recipe": {}}'
    (runs / "digits_4L_1" / "run.json").write_text(content)
    code, out, err = report(capsys, runs)
    assert (code, out) == (2, "")
    assert "run.json is damaged (its step)" in err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", '{"end": [1]}'),
        ("summary.json", '{"end": {"validation_loss": null}}'),
        ("eval/step-000100_all.json", '{"top1": {"value": 0.5, "details": [1]}}'),
        ("eval/step-000100_all.json", '{"top1": {"value": 0.5, "details": {"protocol": {"changed": [1]}}}}'),
        ("metrics.jsonl", None),  # a folder of that name
    ],
)
@pytest.mark.parametrize("form", ["table", "html"])
def test_a_file_of_another_form_costs_its_numbers_alone(capsys, runs, file, content, form):
    path = runs / "digits_4L_1" / file
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        tasks = {"step": 100, "weights_sha256": weights_of("digits_4L_1"), "tasks": json.loads(content)}
        path.write_text(json.dumps(tasks) if file.startswith("eval") else content)
    code, _, err = report(capsys, runs, "--format", form)
    assert code == 0, err


@pytest.mark.parametrize("file", ["run.json", "eval/step-000100_all.json"])
def test_a_damaged_run_is_not_left_out_of_a_table(capsys, runs, file):
    """The table would look as if there had been a seed less."""
    path = runs / "digits_4L_1" / file
    assert report(capsys, runs)[0] == 0
    path.write_bytes(path.read_bytes()[:-1])
    code, _, err = report(capsys, runs)
    assert code == 2
    assert str(path) in err
    assert report(capsys, runs, "digits_0L_*")[0] == 0


def update_at(path, moment):
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "updated": moment}))


def test_a_seed_that_is_there_twice_counts_once(capsys, runs):
    path = write_run(runs, "again", heads=2, seed=1, scores={"top1": 0.86})
    update_at(path, "2027-01-01T00:00:00+0000")
    _, out, err = report(capsys, runs)
    assert "86.00 ± 1.00 (3)" in out
    assert "digits_2L_1 is left out: it has the same recipe and seed as again" in err


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("2026-10-25T02:30:00+0200", "2026-10-25T02:10:00+0100"),  # the clock goes back from 3:00 to 2:00
        ("2026-01-02T01:00:00+0900", "2026-01-01T20:00:00-0500"),  # 16:00 and 1:00 of the next day in UTC
        ("unreadable", "2026-01-01T00:00:00+0000"),
        (["2027"], "2026-01-01T00:00:00+0000"),
        (None, "2026-01-01T00:00:00+0000"),
    ],
)
def test_the_newer_run_is_so_in_every_time_zone(capsys, tmp_path, older, newer):
    """Of the same seed the newer run counts; the page begins with the experiment that changed last."""
    update_at(write_run(tmp_path, "older", heads=2, scores={"top1": 0.1}), older)
    update_at(write_run(tmp_path, "newer", heads=2, scores={"top1": 0.2}), newer)
    _, out, err = report(capsys, tmp_path)
    assert "20.00" in out
    assert "older is left out: it has the same recipe and seed as newer" in err
    update_at(write_run(tmp_path, "dino", "dino_quickstart"), older)
    drawn = experiments_of(group(collect([], tmp_path).runs, [HEADS], []))
    assert [[run.name for run in experiment.runs] for experiment in drawn] == [["newer"], ["dino"]]


def test_one_plan_written_in_two_ways_is_one_row(capsys, tmp_path):
    write_run(tmp_path, "a", heads=2, seed=0, scores={"top1": 0.5})
    write_run(tmp_path, "b", heads=[2, 2, 2, 2], seed=1, scores={"top1": 0.7})
    write_run(tmp_path, "c", heads="linear(0, 3)", seed=0, scores={"top1": 0.9})
    (table,) = told(capsys, tmp_path)
    assert [(row["row"], row["cells"]["top1"]["n"]) for row in table["rows"]] == [("[0, 1, 2, 3]", 1), ("2", 2)]


def test_rows_by_another_key(capsys, tmp_path):
    for rate in ("1e-3", "2e-3"):
        for seed in (0, 1):
            value = 0.5 + seed / 10 + (rate == "2e-3") / 10
            write_run(tmp_path, f"r{rate}-{seed}", seed=seed, change=[f"optimizer.lr={rate}"], scores={"top1": value})
    (table,) = told(capsys, tmp_path, "--rows", "optimizer.lr")
    assert [(row["row"], round(row["cells"]["top1"]["mean"], 6)) for row in table["rows"]] == [
        ("0.001", 55.0),
        ("0.002", 65.0),
    ]


def test_measurements_of_other_conditions_stay_apart(capsys, runs):
    """A score of 100 examples, or of an older checkpoint, is not the score."""
    write_evaluation(runs / "digits_0L_0", {"top1": 0.01}, "few.json", limit=100)
    write_evaluation(runs / "digits_0L_0", {"top1": 0.02}, "early.json", step=50)
    _, out, err = report(capsys, runs)
    assert "82.00 ± 2.00 (3)" in out
    assert "top1 [limit 100] is not shown" in err
    (table,) = told(capsys, runs, "--columns", "top1 [limit 100]")
    assert [row["cells"]["top1 [limit 100]"]["mean"] for row in table["rows"]] == [1.0, None, None]
    assert "early.json is of step 50, not of the last weights" in err


def test_a_quick_look_does_not_replace_the_validation(capsys, tmp_path):
    for seed in range(2):
        write_run(tmp_path, f"digits_0L_{seed}", seed=seed, curve=[2.0, 1.0])
    (before,) = told(capsys, tmp_path)
    write_evaluation(tmp_path / "digits_0L_0", {"top1": 0.01}, "few.json", limit=100)
    _, _, err = report(capsys, tmp_path)
    assert "top1 [limit 100] is not shown" in err
    assert told(capsys, tmp_path) == [before]


def test_a_folder_that_is_not_there_is_one_sentence(capsys, runs, tmp_path):
    code, _, err = report(capsys, runs, "--format", "csv", "--out", str(tmp_path / "no" / "x.csv"))
    assert (code, "make it first" in err) == (2, True)


def test_analyses_are_columns(capsys, runs):
    found = {f"digits_{k}L_{s}": (k, 4, [{"layer": 3, "k_0.99": 20.0 - k + s}]) for k in TOP1 for s in range(3)}
    write_analysis(runs / "analysis", "spectrum", found)
    (table,) = told(capsys, runs, "--columns", "k_0.99")
    cells = [row["cells"]["spectrum.k_0.99"] for row in table["rows"]]
    assert [cell["mean"] for cell in cells] == pytest.approx([21.0, 19.0, 17.0])
    assert {cell["mark"] for cell in cells} == {None}  # neither more nor fewer is better


def test_analyses_of_different_limits_are_not_averaged(capsys, runs):
    for name, value, limit in (("digits_0L_0", 30.0, None), ("digits_0L_1", 10.0, 4)):
        found = {name: (0, 4, [{"layer": 3, "k_0.99": value}])}
        write_analysis(runs / name / "analysis", "spectrum", found, settings={"limit": limit})
    (table,) = told(capsys, runs, "--columns", "k_0.99")
    cells = {name: cell for name, cell in table["rows"][0]["cells"].items() if cell["mean"] is not None}
    assert {name: (cell["mean"], cell["n"]) for name, cell in cells.items()} == {
        "spectrum.k_0.99": (30.0, 1),
        "spectrum.k_0.99 [limit 4]": (10.0, 1),
    }


def test_an_analysis_of_other_weights_is_left_out(capsys, runs):
    write_analysis(runs / "analysis", "spectrum", {"digits_0L_0": (0, 4, [{"layer": 3, "k_0.99": 20.0}])})
    path = runs / "analysis" / "spectrum.json"
    path.write_text(path.read_text().replace('"weights_sha256": "', '"weights_sha256": "00'))
    code, _, err = report(capsys, runs, "--columns", "k_0.99")
    assert code == 2
    assert "no run has a number 'k_0.99'" in err


def test_best_takes_analyses_of_the_best_weights_alone(capsys, tmp_path):
    """The best step is 50, the last 100; the command that is shown for the number measures those weights again."""
    kept = {"end": {"validation_top1": 0.8}, "best": {"validation_top1": 0.9}, "best_step": 50}
    run = write_run(tmp_path, "kept", heads=0)
    (run / "summary.json").write_text(json.dumps(kept))
    for what, step in (("spectrum", 50), ("cossim", 100)):
        write_analysis(run / "analysis", what, {"kept": (0, 4, [{"layer": 3, "k_0.99": 20.0}])}, step=step)
    collection = collect(["kept"], tmp_path, "best")
    (result,) = collection.runs
    assert [name for name in result.numbers if name.endswith("k_0.99")] == ["spectrum.k_0.99"]
    assert collection.notes == ["kept: cossim.json is of step 100, not of the best weights"]
    (command,) = analysis_commands(result)
    assert "--checkpoint best" in command
    (last,) = collect(["kept"], tmp_path).runs
    assert all("--checkpoint" not in line for line in analysis_commands(last))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing*"], "there is no run nothing*"),
        (["--rows", "model.laplacian_head"], "did you mean model.laplacian_heads?"),
        (["--columns", "top7"], "no run has a number 'top7'; there are"),
        (["--baseline", "7"], "no row is called '7'; the rows are 0, 2, 4"),
        (["--paper", "table1", "--columns", "top1"], "leave out --rows, --columns and --baseline"),
        (["--columns", "top1,,"], "names with commas between them"),
    ],
)
def test_wrong_usage(capsys, runs, arguments, message):
    code, out, err = report(capsys, runs, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_markdown(capsys, runs):
    _, out, _ = report(capsys, runs, "--format", "markdown")
    assert "| **91.00 ± 1.73 (3)** |" in out
    assert "| <u>86.00 ± 1.00 (3)</u> |" in out
    widths = {line.count("|") - line.count("\\|") for line in out.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_text_from_recipes_is_no_markup(capsys, tmp_path):
    """Names can hold anything; here a text with marks of every form."""
    odd = "cost $5_{x} & 100% #1 ~ ^ \\ | <b>*x*</b>"
    write_run(tmp_path, "a", "quickstart", heads=0, change=[f"validation.prompts={json.dumps([odd])}"])
    write_run(tmp_path, "b", "quickstart", heads=0, change=['validation.prompts=["plain"]'])
    arguments = ("--rows", "validation.prompts", "--columns", "validation_loss")
    _, latex, _ = report(capsys, tmp_path, "--format", "latex", *arguments)
    row = next(line for line in latex.splitlines() if "cost" in line)
    assert r"cost \$5\_\{x\} \& 100\% \#1 \textasciitilde{} \textasciicircum{}" in row
    _, markdown, _ = report(capsys, tmp_path, "--format", "markdown", *arguments)
    row = next(line for line in markdown.splitlines() if "cost" in line)
    assert r"\<b\>\*x\*\</b\>" in row


COMPILERS = ("pdflatex", "lualatex", "xelatex", "tectonic")


def test_a_row_of_latex_does_not_begin_with_a_bracket(capsys, tmp_path):
    """Which would be an option of the line before."""
    write_run(tmp_path, "a", heads=[0, 0, 4, 4], scores={"top1": 0.5})
    _, out, _ = report(capsys, tmp_path, "--format", "latex")
    assert "{[}0, 0, 4, 4{]} &" in out
    assert not re.search(r"^\s*\[", out, re.MULTILINE)


def test_latex_is_in_the_papers_style(capsys, runs):
    _, out, _ = report(capsys, runs, "--format", "latex")
    assert r"$\mathbf{91.00 \pm 1.73}$ (3)" in out
    assert r"\underline{$86.00 \pm 1.00$} (3)" in out
    body = [line for line in out.splitlines() if line.endswith(r"\\")]
    assert len({line.count("&") - line.count(r"\&") for line in body}) == 1
    for environment in ("table", "tabular"):
        assert out.count(f"\\begin{{{environment}}}") == out.count(f"\\end{{{environment}}}") == 1


def test_latex_compiles(capsys, runs, tmp_path):
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        pytest.skip(
            "there is no LaTeX compiler here (`apt-get install texlive-latex-recommended`): nothing was compiled"
        )
    _, out, _ = report(capsys, runs, "--format", "latex")
    document = tmp_path / "table.tex"
    document.write_text(f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{out}\\end{{document}}")
    options = [] if compiler == "tectonic" else ["-interaction=nonstopmode", "-halt-on-error"]
    done = run_process([compiler, *options, document.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_report_needs_no_torch(runs):
    """Importing it would cost seconds, and a laptop that only reads results may not have it."""
    code = "import sys\nsys.modules['torch'] = None\nfrom lapcli.cli import main\nmain()"
    arguments = ["report", "--runs-dir", str(runs), "--format", "html"]
    done = run_process([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (runs / "report.html").is_file()


@pytest.mark.parametrize("form", ["csv", "html"])
def test_out_that_cannot_be_written_is_one_sentence(capsys, runs, form):
    for out in (runs, runs / "no" / "where.txt", runs / "digits_0L_0" / "run.json" / "x.txt"):
        code, _, err = report(capsys, runs, "--format", form, "--out", str(out))
        assert code == 2
        assert err.startswith(f"lap: --out {out}")


def test_out_writes_a_file(capsys, runs, tmp_path):
    path = tmp_path / "table.csv"
    code, out, _ = report(capsys, runs, "--format", "csv", "--out", str(path))
    assert (code, out.strip()) == (0, str(path))
    assert len(path.read_text().splitlines()) == 1 + 3
