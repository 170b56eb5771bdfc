"""The real problems: every canonical solution passes, and nothing passes that returns None."""

import gzip
import json

import pytest

from lapcli.sandbox import Candidate, run_all


@pytest.fixture
def problems(test_data):
    with gzip.open(test_data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 164
    return rows


def verdicts(problems, body, mode):
    programs = [
        Candidate(row["prompt"], row["prompt"] + body(row), row["test"], row["entry_point"]) for row in problems
    ]
    return {row["task_id"]: verdict for row, verdict in zip(problems, run_all(programs, mode, workers=2), strict=True)}


def test_canonical_solutions_pass(problems, mode):
    found = verdicts(problems[::4], lambda row: row["canonical_solution"], mode)
    assert not {task: verdict.reason for task, verdict in found.items() if not verdict.passed}


@pytest.mark.long
def test_return_none_never_passes(problems, mode):
    found = verdicts(problems, lambda row: "    return None\n", mode)
    assert not {task: verdict.reason for task, verdict in found.items() if verdict.passed}
