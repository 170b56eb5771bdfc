"""Tasks of lm-eval that `lap` knows nothing of: units, directions and intervals are those of lm-eval's own metrics."""

import json
import os

import pytest
import torch
from harness_support import evaluated, make_run
from lm_eval.tasks import TaskManager
from support import run_main

from lapcli.evaluation.harness.run import average, table
from lapcli.evaluation.tasks import TaskScore
from lapcli.report.collect import collect, grids_of
from lapcli.report.tables import column_of

torch.set_num_threads(1)

# The first metric is the score: as in LAMBADA, one where lower is better; brier_score has no standard error.
CHOICES = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: {kind}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
doc_to_choice: ["water", "stone"]
metric_list: [{metrics}]
"""
BRIER = "{metric: brier_score, higher_is_better: false}"
ACC = "{metric: acc, aggregation: mean, higher_is_better: true}"
PERPLEXITY = "{metric: perplexity, aggregation: perplexity, higher_is_better: false}"


@pytest.fixture
def base(tmp_path):
    return make_run(tmp_path / "runs", "language_model")


@pytest.fixture
def tasks(tmp_path):
    rows = [{"question": f"Which {word}?", "answer": n % 2, "word": " light"} for n, word in enumerate("abcdef")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = {}
    for name, kind, target, metrics in (
        ("made_likelihood", "loglikelihood", '"{{word}}"', f"{PERPLEXITY}, {ACC}"),
        ("made_brier", "multiple_choice", "answer", BRIER),
        ("made_piqa", "multiple_choice", "answer", ACC),
    ):
        made[name] = tmp_path / f"{name}.yaml"
        text = CHOICES.format(name=name, file=file, kind=kind, target=target, metrics=metrics)
        if kind == "loglikelihood":
            text = text.replace('doc_to_choice: ["water", "stone"]\n', "")
        made[name].write_text(text)
    return made


def test_units_directions_and_intervals(base, tasks, capsys):
    chosen = ",".join(map(str, tasks.values()))
    result = evaluated(base, chosen, None, protocol="harness")
    base.update(weights_sha256=result["weights_sha256"])
    found = result["tasks"]
    likelihood, brier, accuracy = (found[name] for name in tasks)
    assert (likelihood["is_fraction"], likelihood["higher_is_better"]) == (False, False)
    assert likelihood["details"]["metric"] == "perplexity"
    assert likelihood["interval"][0] < likelihood["value"] < likelihood["interval"][1]
    assert (brier["is_fraction"], brier["higher_is_better"], brier["interval"]) == (False, False, None)
    assert (accuracy["is_fraction"], accuracy["higher_is_better"]) == (True, True)
    scores = [TaskScore(**found[name]) for name in tasks]
    lines = {line.split()[-4] if len(line.split()) > 3 else "": line for line in table(scores)}
    assert "%" not in lines["perplexity"]
    assert "%" not in lines["brier_score"]
    assert lines["acc"].count("%") == 2
    assert average(scores) is None
    # The report and the ranking read unit and direction from the result.
    (grid,) = grids_of(collect([], base.path.parent))
    columns = [column_of(name, grid) for name in tasks]
    assert [(column.unit, column.direction) for column in columns] == [
        (None, "lower"),
        (None, "lower"),
        ("fraction", "higher"),
    ]
    code, _, err = run_main(capsys, "export", "--run", str(base.path), "--to", "hf", "--out", str(base.path / "out"))
    assert code == 0, err
    (line,) = (line for line in (base.path / "out" / "README.md").read_text().splitlines() if "| made_brier |" in line)
    assert line.split("|")[4].strip() == "-"


def test_a_group_without_an_aggregate_is_listed_by_its_members(base, tasks, tmp_path, monkeypatch):
    (tmp_path / "group.yaml").write_text(f"group: made_group\ntask: [{', '.join(tasks)}]\n")
    index = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lapcli.evaluation.harness.lm_eval_tasks._index", lambda: index)
    monkeypatch.setattr("lapcli.evaluation.language_tasks._lm_eval_names", lambda: {"made_group"})
    found = evaluated(base, "made_group", None, protocol="harness")["tasks"]
    assert set(found) == set(tasks)
    assert all(score["count"] == 6 for score in found.values())


def test_long_lists_of_tasks_have_files_of_their_own(base, tasks):
    """They begin alike, for more than a hundred characters."""
    first, second, third = ("./" * 50 + os.path.relpath(file) for file in tasks.values())
    for chosen in (f"{first},{second}", f"{first},{third}"):
        evaluated(base, chosen, None, protocol="harness")
    found = [json.loads(path.read_text()) for path in (base.path / "eval").glob("*.json")]
    assert sorted(sorted(result["tasks"]) for result in found) == [
        ["made_brier", "made_likelihood"],
        ["made_likelihood", "made_piqa"],
    ]
