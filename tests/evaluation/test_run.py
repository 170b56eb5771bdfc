"""Complete evaluations of a tiny run with random weights: stored rows, and settings that must not change them."""

import json
import math
import shutil

import pytest
import torch
from harness_support import (
    QUICK,
    evaluate_in_processes,
    evaluated,
    make_run,
    numbers,
    samples_of,
    tiny_model,
    tiny_tokenizer,
    write_benchmarks,
)

from lapcli.result_rows import results
from lapcli.runs import read_run
from lapcli.runtime.errors import LapError

torch.set_num_threads(1)
PAPER = "arc_easy,arc_challenge,mmlu,gsm8k,humaneval"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    return make_run(folder / "runs"), write_benchmarks(folder / "data")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("harness-base"), "language_model")


@pytest.fixture(scope="module")
def whole(made):
    """The paper's five tasks in one go, and their samples."""
    result = evaluated(made[0], PAPER, made[1], **QUICK)
    return result, samples_of(result)


def copied(run, folder):
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("eval", "results.jsonl"))
    return read_run(folder)


def assert_same(found, whole):
    """Scores and sampled texts agree exactly, log-likelihoods up to rounding."""
    result, expected = whole
    assert numbers(found) == {task: score for task, score in numbers(result).items() if task in found["tasks"]}
    mine = samples_of(found)
    theirs = [line for line in expected if line["task"] in found["tasks"]]
    assert len(mine) == len(theirs) >= 5
    for one, other in zip(mine, theirs, strict=True):
        assert one["prompt"] == other["prompt"]
        if "choices" in one:
            assert [p for p, _ in one["answers"]] == pytest.approx([p for p, _ in other["answers"]], abs=1e-4)
        else:
            assert (one["answers"], one["verdicts"]) == (other["answers"], other["verdicts"])


def test_every_number_is_a_row_keyed_by_its_conditions(made, tmp_path):
    run = copied(made[0], tmp_path / "copy")
    result = evaluated(run, "arc_easy,gsm8k", made[1], **QUICK)
    evaluated(run, "gsm8k", made[1], limit=2, **QUICK)
    evaluated(run, "gsm8k", made[1], set=[*QUICK["set"], "sampling.temperature=0.5"])
    evaluated(run, "gsm8k", made[1], **QUICK)  # the same again, which replaces the first
    rows = results([str(run.path)])
    assert len(rows[rows.metric == "acc"]) == 1
    pass3 = rows[rows.metric == "pass@3"]
    assert len(pass3) == 3
    assert sorted(pass3["limit"].fillna(0)) == [0, 0, 2]
    assert sorted(pass3.conditions) == ["max_tokens 6, samples 3"] * 2 + ["max_tokens 6, samples 3, temperature 0.5"]
    first = pass3[pass3["limit"].isna() & ~pass3.conditions.str.contains("temperature")].iloc[0]
    assert first.value == result["tasks"]["gsm8k"]["value"]
    assert (first.unit, first.direction, first.protocol, first.n, first.step) == ("fraction", "higher", "paper", 5, 1)
    assert first.weights_sha256 == result["weights_sha256"]


@pytest.mark.long
def test_two_processes_with_uneven_documents_agree_with_one(made, whole, tmp_path):
    run = copied(made[0], tmp_path / "copy")
    assert evaluate_in_processes(2, run, PAPER, made[1], **QUICK) == 0
    (kept,) = (run.path / "eval").glob("*.json")
    assert_same(json.loads(kept.read_text()), whole)
    journals = {path.name for path in (run.path / "eval").rglob("process-*.jsonl")}
    assert journals == {"process-0.jsonl", "process-1.jsonl"}
    # Fewer documents than processes.
    assert evaluate_in_processes(2, run, "arc_easy,gsm8k", made[1], limit=1, **QUICK) == 0
    (kept,) = (run.path / "eval").glob("*limit1*.json")
    assert [score["count"] for score in json.loads(kept.read_text())["tasks"].values()] == [1, 1]


def test_a_killed_evaluation_resumes(made, whole, tmp_path, capsys):
    run = copied(made[0], tmp_path / "copy")
    assert evaluate_in_processes(1, run, "mmlu,gsm8k", made[1], die_after=8, **QUICK) == -9  # in the middle of gsm8k
    assert not list((run.path / "eval").glob("*.json"))
    capsys.readouterr()
    resumed = evaluated(run, "mmlu,gsm8k", made[1], **QUICK)
    said = capsys.readouterr().err
    assert "mmlu: reusing 6 saved" in said
    assert "gsm8k: reusing 2 saved" in said
    assert_same(resumed, whole)
    evaluated(run, "gsm8k", made[1], seed=5, **QUICK)  # other settings find nothing of it
    assert "saved" not in capsys.readouterr().err


def test_harness_prompts_match_lm_eval(made, base):
    result = evaluated(base, "arc_easy,mmlu,gsm8k", made[1], limit=2)
    assert result["protocol"] == "harness"  # the default of a base run
    by_task = {line["task"]: line for line in reversed(samples_of(result))}
    arc = by_task["arc_easy"]
    assert arc["prompt"].startswith("Question: Which ")
    assert arc["prompt"].endswith("\nAnswer:")
    assert [choice[0] for choice in arc["choices"]] == [" "] * 4
    mmlu = by_task["mmlu_astronomy"]
    assert mmlu["prompt"].startswith("The following are multiple choice questions (with answers) about astronomy.\n\n")
    assert mmlu["choices"] == [" A", " B", " C", " D"]
    assert by_task["gsm8k"]["prompt"].count("Question:") == 6  # five examples
    metrics = {task: set(score["details"]["metrics"]) for task, score in result["tasks"].items()}
    assert metrics["gsm8k"] == {"exact_match (strict-match)", "exact_match (flexible-extract)"}
    assert metrics["arc_easy"] == {"acc", "acc_norm"}
    assert result["tasks"]["mmlu"]["count"] == 4


def test_bits_per_byte_of_held_out_text(base, tmp_path):
    texts = ("the cat sat on a mat", "one dog")
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    found = evaluated(base, "bpb", tmp_path)["tasks"]["bpb"]
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer.vocab_size)
    nats = 0.0
    for text in texts:
        ids = tokenizer.encode(text)
        logits = model(torch.tensor([[tokenizer.bos, *ids[:-1]]]))[0].double().log_softmax(-1)
        nats -= float(logits[range(len(ids)), ids].sum().detach())
    assert found["value"] == pytest.approx(nats / (math.log(2) * 27), rel=1e-4)
    assert (found["count"], found["unit"], found["direction"]) == (2, "bits", "lower")


def test_diverged_weights_are_an_error(made, tmp_path):
    run = make_run(tmp_path / "runs", damage=True)
    with pytest.raises(LapError, match="not finite"):
        evaluated(run, "gsm8k", made[1], **QUICK)
