"""lm-eval tasks that `lap` does not know: units, directions and intervals come from lm-eval's metrics."""

import json
import math

import pytest
import torch
from harness_support import evaluated, make_run
from lm_eval.tasks import TaskManager
from support import run_main

from lapcli.result_rows import results

torch.set_num_threads(1)

# The first metric is the score: as in LAMBADA, a metric where lower is better; brier_score has no standard error.
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
    result = evaluated(base, ",".join(map(str, tasks.values())), None, protocol="harness")
    likelihood, brier, accuracy = (result["tasks"][name] for name in tasks)
    assert (likelihood["unit"], likelihood["direction"], likelihood["details"]["metric"]) == (
        None,
        "lower",
        "perplexity",
    )
    assert likelihood["interval"][0] < likelihood["value"] < likelihood["interval"][1]
    assert (brier["unit"], brier["direction"], brier["interval"]) == (None, "lower", None)
    assert (accuracy["unit"], accuracy["direction"]) == ("fraction", "higher")
    rows = results([str(base.path)]).set_index(["task", "metric"])
    assert rows.value["made_brier", "brier_score"] == brier["value"]
    assert rows.direction["made_likelihood", "perplexity"] == rows.direction["made_brier", "brier_score"] == "lower"
    assert rows.unit.dropna().to_dict() == {("made_likelihood", "acc"): "fraction", ("made_piqa", "acc"): "fraction"}
    assert math.isnan(rows.stderr["made_brier", "brier_score"])
    where = ["--run", str(base.path), "--protocol", "harness"]
    code, out, err = run_main(capsys, "eval", *where, "--tasks", ",".join(map(str, tasks.values())))
    assert code == 0, err
    lines = {tuple(line.split()[:2]): line for line in out.splitlines()}
    assert "%" not in lines["made_likelihood", "perplexity"] + lines["made_brier", "brier_score"]
    assert "%" in lines["made_piqa", "acc"]


def test_a_group_without_an_aggregate_is_listed_as_its_members(base, tasks, tmp_path, monkeypatch):
    (tmp_path / "group.yaml").write_text(f"group: made_group\ntask: [{', '.join(tasks)}]\n")
    index = TaskManager(include_path=str(tmp_path), include_defaults=False)
    monkeypatch.setattr("lapcli.evaluation.language_tasks.index", lambda: index)
    found = evaluated(base, "made_group", None, protocol="harness")["tasks"]
    assert set(found) == set(tasks)
    assert all(score["count"] == 6 for score in found.values())
