"""A benchmark of another package: evaluated on a GPT and a chat run, resumed, and labelled in reports."""

import json

import pytest
from harness_support import make_run
from runtime.test_plugins import install, lap_with

CAPITALS = """
from lapcli.evaluation.benchmarks.benchmark import Benchmark, Documents, letters_definition

ROWS = [("France", "Paris", "A"), ("Italy", "Rome", "B"), ("Spain", "Madrid", "A"), ("Peru", "Lima", "B")]


def labels_of(document):
    return document["choices"]["label"]


def question(document):
    return f"What is the capital of {document['country']}? " + " ".join(document["choices"]["text"])


class Capitals(Benchmark):
    name = "capitals"
    label = "Capitals"

    def documents(self, split, data):
        rows = [
            {"country": country, "choices": {"text": [city, "Oslo"], "label": ["A", "B"]}, "right": right}
            for country, city, right in ROWS
        ]
        return Documents(rows, {"capitals": "0" * 64})

    def paper_task(self, request):
        definition, splits = self.lm_eval_definition(), {"test": self.documents("test", request.data)}
        return self.prepared(definition, splits, request, is_chat=True)

    def lm_eval_definition(self):
        return letters_definition(self.name, question, labels_of, lambda document: "AB".index(document["right"]))


def register(extensions):
    extensions.add("benchmark", Capitals())
"""


@pytest.mark.long
def test_it_is_evaluated_resumed_and_reported(tmp_path):
    install(tmp_path, "geography", CAPITALS)
    run = make_run(tmp_path / "runs")
    evaluate = ("eval", "--run", str(run.path), "--tasks", "capitals", "--json")
    first = lap_with(tmp_path, *evaluate)
    assert first.returncode == 0, first.stderr
    score = json.loads(first.stdout)["tasks"]["capitals"]
    assert score["count"] == 4
    assert score["value"] in (0, 0.25, 0.5, 0.75, 1)
    again = lap_with(tmp_path, *evaluate)
    assert "capitals: 4 saved" in again.stderr
    assert json.loads(again.stdout)["tasks"]["capitals"] == score
    run.update(weights_sha256=json.loads(first.stdout)["weights_sha256"])
    report = lap_with(tmp_path, "report", "--runs-dir", str(run.path.parent), "--format", "markdown")
    assert report.returncode == 0, report.stderr
    assert "capitals (%)" in report.stdout
