"""The paper's tables beside ours, on run directories that hold the paper's own numbers."""

import re

import pytest
from report_support import write_chat_run, write_evaluation, write_run
from support import run_main

from lapcli.report import paper
from lapcli.report.claims import judge_all
from lapcli.report.collect import collect
from lapcli.report.paper import data_set_of, recipe_differences
from lapcli.report.paper_tables import paper_tables


def test_the_numbers_are_the_papers(test_data):
    """Against the paper's source, where it lies beside the real data."""
    source = test_data.parent / "paper.tex"
    if not source.is_file():
        pytest.skip("the paper's source is not here")
    text = source.read_text()
    number = r"\D{0,20}(\d+\.\d+)"

    def rows(label):
        table = (
            text[: text.index(f"\\label{{{label}}}")].rsplit("\\begin{table}", 1)[1]
            + text[text.index(f"\\label{{{label}}}") :]
        )
        return table[: table.index("\\end{table}")]

    one = rows("tab:top1-accuracy")
    for heads in (0, 3, 6, 9, 11, 12):
        name = "Baseline" if heads == 0 else f"{heads} Laplacians"
        line = one[one.index(f"    {name}") :].split("\\\\")[0].replace(name, "")
        found = [float(value) for value in re.findall(r"\d+\.\d+", line)]
        expected = [value for numbers in paper.CLASSIFICATION.values() for value in numbers[heads]]
        assert found == expected
    two = rows("tab:sft-llm")
    for heads in paper.LANGUAGE_AVERAGE:
        name = "Baseline" if heads == 0 else f"{heads} Laplacian"
        line = two[two.index(f"\n{name}") :].split("\\\\")[0].replace(name, "")
        found = [float(value) for value in re.findall(r"\d+\.\d+", line)]
        expected = [value for numbers in paper.LANGUAGE.values() for value in numbers[heads]]
        assert found == [*expected, paper.LANGUAGE_AVERAGE[heads][0]]
    random = two[two.index("\nRandom") :].split("\\\\")[0]
    assert [float(value) for value in re.findall(r"\d+\.\d+", random)] == list(paper.RANDOM.values())
    three = rows("tab:dino_linear_probe")
    for name, task in (("ImageNet Top-1", "linear"), ("ADE20K mIoU", "ade20k")):
        line = three[three.index(f"\n{name}") :].split("\\\\")[0]
        found = [float(value) for value in re.findall(r"\d+\.\d+", line)]
        assert found == [value for value, _ in paper.SELF_SUPERVISED[task].values()]
    components = re.search(rf"drops from{number} in the baseline to{number}", text)
    assert tuple(map(float, components.groups())) == tuple(value for value, _ in paper.COMPONENTS.values())


def test_the_papers_averages_are_means_of_its_columns():
    for heads, (average, _) in paper.LANGUAGE_AVERAGE.items():
        mean = sum(numbers[heads][0] for numbers in paper.LANGUAGE.values()) / 5
        assert mean == pytest.approx(average, abs=0.0051)


def test_table1_takes_the_drop_path_with_the_best_baseline(collected):
    (table,) = paper_tables("table1", collected)
    assert [row.label for row in table.rows] == ["Baseline", *(f"{k} Laplacians" for k in (3, 6, 9, 11, 12))]
    for place, numbers in enumerate(paper.CLASSIFICATION.values()):
        for row, (mean, std) in zip(table.rows, numbers.values(), strict=True):
            cell = row.cells[place]
            assert cell.summary.mean * 100 == pytest.approx(mean)
            assert cell.summary.std * 100 == pytest.approx(std * 2**0.5)  # two seeds at +-std, n - 1
            assert cell.paper == (mean, std)
    said = " ".join(table.notes)
    assert "ImageNet: drop path 0.4, the one with the best baseline" in said
    assert "0.1: 70.00, 0.3: 70.00, 0.4: 81.45" in said
    # The paper's own marks, read from its table.
    marks = [[row.cells[place].mark for row in table.rows] for place in range(3)]
    assert marks[0] == [None, None, None, None, "best", "second"]
    assert marks[1] == [None, None, None, None, "second", "best"]
    assert marks[2] == [None, "best", "second", None, None, None]


def test_table2_has_random_average_and_standard_errors(collected):
    table, components = paper_tables("table2", collected)
    assert table.rows[0].label == "Random"
    assert [cell.paper[0] for cell in table.rows[0].cells[:5]] == [25.0, 25.0, 25.0, 0.0, 0.0]
    assert table.rows[0].cells[5].paper is None
    assert not [gap for gap in table.gaps() if "Random" in gap]
    for row, heads in zip(table.rows[1:], paper.LANGUAGE_AVERAGE, strict=True):
        for cell, numbers in zip(row.cells, paper.LANGUAGE.values(), strict=False):
            assert cell.summary.mean * 100 == pytest.approx(numbers[heads][0])
            assert cell.summary.error * 100 == pytest.approx(numbers[heads][1], abs=1e-9)
            assert cell.summary.n == 2
        assert row.cells[5].summary.mean * 100 == pytest.approx(paper.LANGUAGE_AVERAGE[heads][0], abs=0.0051)
    averages = {row.label: row.cells[5].mark for row in table.rows}
    assert (averages["9 Laplacians"], averages["5 Laplacians"]) == ("best", "second")
    assert [row.cells[0].paper[0] for row in components.rows if row.cells[0].paper] == [547.7, 430.4]
    assert components.rows[-1].cells[0].summary.mean == pytest.approx(430.4)


QUESTIONS = {"arc_easy": 2376, "arc_challenge": 1172, "mmlu": 14042, "gsm8k": 1319, "humaneval": 164}


def can_come_from(seeds, questions, mean, spread, divisor):
    """Whether some numbers of right answers have that mean and sqrt(sum of squares / divisor), both in %.

    Percentages seem to have been rounded before they were averaged and after: to within 0.01.
    """
    slack = 0.01 + 1e-9
    for total in range(int((mean - 0.02) * questions * seeds / 100), int((mean + 0.02) * questions * seeds / 100) + 2):
        if abs(100 * total / questions / seeds - mean) > slack:
            continue
        middle, far = total / seeds, int((spread + 0.02) * questions / 100 * divisor**0.5) + 2
        near = range(round(middle) - far, round(middle) + far + 1)
        firsts = [(first,) for first in near] if seeds == 2 else [(a, b) for a in near for b in near if a <= b]
        for some in firsts:
            squares = sum((right - middle) ** 2 for right in (*some, total - sum(some)))
            if abs(100 * (squares / divisor) ** 0.5 / questions - spread) <= slack:
                return True
    return False


@pytest.mark.parametrize("task", ["arc_challenge", "gsm8k", "humaneval"])
def test_what_is_said_of_the_papers_errors(task, collected):
    """Standard errors: sum of squares over n (n - 1). The sets of questions are small enough to try all counts."""
    for heads, (mean, spread) in paper.LANGUAGE[task].items():
        two = can_come_from(2, QUESTIONS[task], mean, spread, 2)
        assert two == (heads != 0), heads
    assert can_come_from(3, QUESTIONS[task], *paper.LANGUAGE[task][0], 6)
    if task == "humaneval":  # neither are they deviations of three seeds, with ddof 0 or 1
        assert not can_come_from(3, 164, *paper.LANGUAGE[task][0], 3)
        assert not can_come_from(3, 164, *paper.LANGUAGE[task][0], 2)
    table, _ = paper_tables("table2", collected)
    assert "no two seeds give ±0.13 on the 1,319 problems of GSM8K, or ±0.70 on the 164 of HumanEval" in table.notes[0]


def test_table2_shows_the_error_of_three_seeds_as_such(tmp_path, capsys):
    """And deviations if they are asked for."""
    for seed, value in enumerate((0.20, 0.22, 0.27)):
        write_chat_run(tmp_path, f"gpt_{seed}", heads=0, seed=seed, scores={"gsm8k": value})
    squares = 3**2 + 1**2 + 4**2
    for arguments, expected, words in (
        ([], (squares / 6) ** 0.5, "Mean ± standard error of the mean over seeds"),
        (["--ddof", "1"], (squares / 2) ** 0.5, "Mean ± standard deviation over seeds (ddof 1)"),
    ):
        code, out, _ = run_main(capsys, "report", "--runs-dir", str(tmp_path), "--paper", "table2", *arguments)
        assert code == 0
        assert f"23.00 ± {expected:.2f} (3)" in out
        assert words in out


def test_table3_ties_are_both_best(collected):
    (table,) = paper_tables("table3", collected)
    by_row = {row.label: row.cells for row in table.rows}
    assert (by_row["3 Laplacians"][0].mark, by_row["5 Laplacians"][0].mark) == ("best", "best")
    assert by_row["5 Laplacians"][1].mark == "best"
    assert by_row["6 Laplacians"][1].summary.std is None


def write_search(runs, *, mark):
    """What `recipes/sweeps/imagenet.yaml` leaves: a search that chose another rate and decay, and a grid with them."""
    keep = "schedule.start_lr=3e-6"
    for rate, decay, value in (("3e-3", "0.02", 0.805), ("4e-3", "0.05", 0.81)):
        name = f"vitb_imagenet-search-lr{rate}-weight_decay{decay}"
        change = [f"optimizer.lr={rate}", f"optimizer.weight_decay={decay}", keep, "data.validation=0.01"]
        write_run(runs, name, "vitb_imagenet", change=change, scores={"top1": value})
        if mark == "mark":
            (runs / name / "sweep.json").write_text('{"search": true}')
        elif mark == "log":  # of version 0.1
            (runs / ".sweeps").mkdir(exist_ok=True)
            (runs / ".sweeps" / f"{name}.log").write_text("")
    for heads, value in ((0, 0.79), (3, 0.80)):
        for rate in ("0.3", "0.4"):
            change = ["optimizer.lr=4e-3", "optimizer.weight_decay=0.05", keep, f"model.drop_path={rate}"]
            scores = {"top1": value + (rate == "0.4") / 100}
            write_run(runs, f"grid-{heads}L-{rate}", "vitb_imagenet", heads=heads, change=change, scores=scores)


@pytest.mark.parametrize("mark", ["mark", "neither"])
def test_a_run_of_a_search_is_no_result(tmp_path, capsys, mark):
    """Of which the paper's own rate and decay are two, so that it is nearer to the paper's recipe than the grid is."""
    write_search(tmp_path, mark=mark)
    runs = collect([], tmp_path).runs
    (table,) = paper_tables("table1", runs)
    shown = {row.label: row.cells[2].summary for row in table.rows if row.cells[2].summary}
    assert {row: round(100 * summary.mean, 6) for row, summary in shown.items()} == {
        "Baseline": 80.0,
        "3 Laplacians": 81.0,
    }
    said = " ".join(table.notes)
    assert "ImageNet: drop path 0.4" in said
    assert "optimizer.lr 0.004 (paper: 0.003)" in said
    assert "schedule.start_lr 3e-06 (paper: 0.001)" in said
    assert not [v for v in judge_all(runs) if v.status != "not run"]
    code, out, err = run_main(capsys, "report", "--runs-dir", str(tmp_path), "--paper", "table1")
    assert code == 0
    assert "80.50" not in out
    if mark == "neither":  # then what it was measured on tells
        assert "ImageNet: 2 runs were measured on training images held out (data.validation)" in said
    else:
        assert "2 runs of a search are not results and are not shown" in err


def test_a_grid_with_something_to_compare_comes_before_one_run_of_the_papers_recipe(tmp_path):
    write_run(tmp_path, "alone", "vitb_cifar100", heads=0, scores={"top1": 0.5})
    for heads in (0, 6):
        write_run(
            tmp_path, f"r{heads}", "vitb_cifar100", heads=heads, change=["optimizer.lr=1e-3"], scores={"top1": 0.7}
        )
    (table,) = paper_tables("table1", collect([], tmp_path).runs)
    assert [row.cells[1].summary.mean for row in table.rows if row.cells[1].summary] == [0.7, 0.7]
    (said,) = [note for note in table.notes if "Not used" in note]
    assert "learning rate 0.0003 (1 runs)" in said


def test_ours_minus_paper(capsys, tmp_path):
    write_run(tmp_path, "a", "vitb_cifar10", heads=0, scores={"top1": 0.96})
    code, out, err = run_main(capsys, "report", "--runs-dir", str(tmp_path), "--paper", "table1")
    assert code == 0
    assert "95.35 ± 0.16 (+0.65)" in out
    assert "row Baseline, ImageNet (%): no score" in err
    assert run_main(capsys, "report", "--runs-dir", str(tmp_path), "--paper", "table1", "--strict")[0] == 1


def test_another_protocol_is_not_the_papers(tmp_path):
    path = write_chat_run(tmp_path, "gpt", heads=0, seed=0, scores={"mmlu": 0.3})
    write_evaluation(path, {"arc_easy": 0.9}, "other.json", protocol="harness")
    table, _ = paper_tables("table2", collect([], tmp_path).runs)
    baseline = next(row for row in table.rows if row.label == "Baseline")
    assert baseline.cells[0].summary is None
    assert baseline.cells[2].summary.mean == 0.3
    assert baseline.cells[5].summary is None  # no average of one task
    assert any("arc_easy [protocol harness]" in note for note in table.notes)


def test_data_sets_and_recipes_are_recognised(collected, tmp_path):
    by_name = {run.name: run for run in collected}
    assert data_set_of(by_name["CIFAR10_0L_0"]) == "CIFAR10"
    assert data_set_of(by_name["CIFAR100_0L_0"]) == "CIFAR100"
    assert data_set_of(by_name["dino_0L"]) == "ImageNet"
    for name in (
        "CIFAR10_0L_0",
        "CIFAR100_12L_1",
        "ImageNet_dp0.3_6L",
        "dino_5L",
        "gpt_3L_1",
        "gpt_3L_1-midtrain",
        "gpt_3L_1-sft",
    ):
        assert recipe_differences(by_name[name]) == [], name
    write_run(tmp_path, "digits", "vit_digits")
    write_run(tmp_path, "short", "vitb_cifar10", change=["train.epochs=30", "optimizer.lr=1e-4", "data.workers=2"])
    digits, short = collect([], tmp_path).runs
    assert data_set_of(digits) is None
    assert recipe_differences(digits) is None
    assert {key for key, _, _ in recipe_differences(short)} == {"optimizer.lr", "train (length)"}
