"""The paper's tables beside ours, on run directories that hold the paper's own numbers."""

import re

import pytest
from report_support import write_chat_run, write_run

from lapcli.report import paper
from lapcli.report.collect import collect, grids_of
from lapcli.report.paper import paper_tables
from lapcli.runs import read_run
from lapcli.same_recipe import data_set_of, paper_differences, whole_recipe


def made(which, runs):
    return paper_tables(which, grids_of(collect([], runs)))


def test_the_numbers_match_the_paper(test_data):
    """Against the paper's source, if it is beside the real data."""
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


def test_table1_takes_the_drop_path_with_the_best_baseline(paper_grids):
    (table,) = paper_tables("table1", paper_grids)
    assert [row.label for row in table.rows] == ["Baseline", *(f"{k} Laplacians" for k in (3, 6, 9, 11, 12))]
    for place, numbers in enumerate(paper.CLASSIFICATION.values()):
        for row, (mean, std) in zip(table.rows, numbers.values(), strict=True):
            cell = row.cells[place]
            assert cell.summary.mean * 100 == pytest.approx(mean)
            assert cell.summary.std * 100 == pytest.approx(std)
            assert cell.paper == (mean, std)
    # The paper's own highlighting, read from its table.
    marks = [[row.cells[place].mark for row in table.rows] for place in range(3)]
    assert marks[0] == [None, None, None, None, "best", "second"]
    assert marks[1] == [None, None, None, None, "second", "best"]
    assert marks[2] == [None, "best", "second", None, None, None]


def test_table2_has_random_average_and_standard_errors(paper_grids):
    table, components = paper_tables("table2", paper_grids)
    assert [cell.paper[0] for cell in table.rows[0].cells[:5]] == [25.0, 25.0, 25.0, 0.0, 0.0]
    for row, heads in zip(table.rows[1:], paper.LANGUAGE_AVERAGE, strict=True):
        for cell, numbers in zip(row.cells, paper.LANGUAGE.values(), strict=False):
            assert cell.summary.mean * 100 == pytest.approx(numbers[heads][0])
            assert cell.summary.error * 100 == pytest.approx(numbers[heads][1], abs=1e-9)
        assert row.cells[5].summary.mean * 100 == pytest.approx(paper.LANGUAGE_AVERAGE[heads][0], abs=0.0051)
    averages = {row.label: row.cells[5].mark for row in table.rows}
    assert (averages["9 Laplacians"], averages["5 Laplacians"]) == ("best", "second")
    assert components.rows[-1].cells[0].summary.mean == pytest.approx(430.4)


def test_table3_has_no_best_where_two_are_equal(paper_grids):
    (table,) = paper_tables("table3", paper_grids)
    by_row = {row.label: row.cells for row in table.rows}
    assert (by_row["3 Laplacians"][0].mark, by_row["5 Laplacians"][0].mark) == (None, None)
    assert by_row["5 Laplacians"][1].mark == "best"


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_search_run_is_not_a_result(tmp_path, is_marked):
    """Although it is closer to the paper's recipe than the grid; without a mark, its evaluation data identify it."""
    path = write_run(tmp_path, "search", "vitb_imagenet", change=["data.validation=0.01"], scores={"top1": 0.805})
    if is_marked:
        (path / "sweep.json").write_text('{"search": true}')
    for heads, value in ((0, 0.79), (3, 0.80)):
        for rate in ("0.3", "0.4"):
            change = ["optimizer.lr=4e-3", f"model.drop_path={rate}"]
            scores = {"top1": value + (rate == "0.4") / 100}
            write_run(tmp_path, f"grid-{heads}L-{rate}", "vitb_imagenet", heads=heads, change=change, scores=scores)
    (table,) = made("table1", tmp_path)
    shown = {row.label: row.cells[2].summary for row in table.rows if row.cells[2].summary}
    assert {row: round(100 * each.mean, 6) for row, each in shown.items()} == {"Baseline": 80.0, "3 Laplacians": 81.0}
    assert "optimizer.lr 0.004 (paper: 0.003)" in " ".join(table.notes)


def test_data_sets_and_recipes_are_recognised(paper_grids, tmp_path):
    for grid in paper_grids:
        assert paper.differences(grid) == [], grid.title
    found = {grid.first.data_set for grid in paper_grids}
    assert found == {"CIFAR10", "CIFAR100", "ImageNet", "FineWeb-Edu", None}  # None: of a mixture of conversations
    change = ["train.epochs=30", "optimizer.lr=1e-4", "data.workers=2"]
    runs = {
        "digits": write_run(tmp_path, "digits", "vit_digits"),
        "short": write_run(tmp_path, "short", "vitb_cifar10", change=change),
        "text": write_run(tmp_path, "text", "gpt561m", change=["data.train=books", "data.files=null"]),
    }
    differing = {name: {key for key, _, _ in paper_differences(read_run(path))} for name, path in runs.items()}
    assert differing["short"] == {"optimizer.lr", "train.epochs"}
    assert "data.train" in differing["text"]
    assert {"data.train", "model.layers"} <= differing["digits"]
    assert data_set_of(whole_recipe(read_run(runs["digits"])).keys, {}) is None


def test_a_stage_counts_with_all_stages_before_it(tmp_path):
    """Fine-tuned from differently pretrained weights, it is not the paper's model."""
    path = write_chat_run(tmp_path, "gpt", heads=0, seed=1, scores=None)
    assert paper_differences(read_run(path)) == []
    assert whole_recipe(read_run(path)).seeds == ("1", "42", "42")
    first = tmp_path / "gpt" / "run.json"
    first.write_text(first.read_text().replace('"batch": 256,', '"batch": 128,'))
    keys = {key for key, _, _ in paper_differences(read_run(path))}
    assert keys == {"start.start.train.batch"}
