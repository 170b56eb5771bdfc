"""Whole evaluations of a tiny run with random weights, on small files: what is kept, and what changes nothing."""

import json
import os
import shutil
import sys
from pathlib import Path

import datasets
import pytest
import torch
from harness_support import (
    QUICK,
    evaluate_in_processes,
    evaluated,
    make_run,
    numbers,
    tiny_model,
    write_benchmarks,
)
from lm_eval import evaluator
from lm_eval.tasks import TaskManager
from support import HANG, ROOT, run_main, run_process

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.evaluation.harness.lm_eval_tasks import _index
from lapcli.evaluation.language_tasks import _lm_eval_names
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import read_json, sha256_of_file

torch.set_num_threads(1)
PAPER = "arc_easy,arc_challenge,mmlu,gsm8k,humaneval"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    return make_run(folder / "runs"), write_benchmarks(folder / "data")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("harness-base"), "language_model")


@pytest.fixture
def calls(monkeypatch):
    """Every call of lm-eval's `evaluate`: the tasks of each; its index of all tasks must not be built."""
    seen = []
    before = evaluator.evaluate

    def watched(*args, **options):
        seen.append(sorted(options["task_dict"]["tasks"]))
        return before(*args, **options)

    monkeypatch.setattr(evaluator, "evaluate", watched)
    monkeypatch.setattr(TaskManager, "__init__", lambda *_, **__: pytest.fail("lm-eval's index was built"))
    return seen


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return tmp_path_factory.mktemp("samples") / "whole.jsonl"


@pytest.fixture(scope="module")
def whole(made, samples):
    """The paper's five tasks in one go, answers journalled."""
    run, data = made
    return evaluated(run, PAPER, data, samples_out=samples, **QUICK)


def assert_same_answers(found, expected):
    """Sampled texts to the letter, log-likelihoods to rounding: much stronger than the same accuracies."""
    mine, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in (found, expected))
    tasks = {line["task"] for line in mine}
    theirs = [line for line in theirs if line["task"] in tasks]
    assert len(mine) == len(theirs) >= 5
    for one, other in zip(mine, theirs, strict=True):
        assert one["prompt"] == other["prompt"]
        if "choices" in one:
            assert [p for p, _ in one["answers"]] == pytest.approx([p for p, _ in other["answers"]], abs=1e-4)
        else:
            assert one["answers"] == other["answers"]
            assert one["verdicts"] == other["verdicts"]


def test_each_task_is_one_call_of_lm_eval(made, calls):
    run, data = made
    evaluated(run, f"{PAPER},spelling", data, limit=2, **QUICK)
    assert calls == [[name] for name in (*PAPER.split(","), "spelling")]
    calls.clear()
    evaluated(run, PAPER, data, limit=1, protocol="harness")
    assert [names[0] for names in calls] == ["arc_easy", "arc_challenge", "mmlu_astronomy", "gsm8k", "humaneval"]


def test_the_result_names_what_it_is(made, whole):
    run, _ = made
    assert whole["protocol"] == "paper"
    assert whole["settings"] == {"samples": 3, "temperature": 1.0, "top_k": 50, "max_new_tokens": 6, "seed": 1234}
    assert (whole["dtype"], whole["world_size"], whole["limit"]) == ("float32", 1, None)
    weights = run.checkpoints / "step-000001" / "model.safetensors"
    assert whole["weights_sha256"] == sha256_of_file(weights)
    assert [score["count"] for score in whole["tasks"].values()] == [7, 5, 6, 5, 2]
    for task, score in whole["tasks"].items():
        details = score["details"]
        assert details["protocol"] == "paper"
        assert len(details["prompt_sha256"]) == 64
        assert details["version"] == (3 if task in ("gsm8k", "humaneval") else 1)
        for path, digest in details["files"].items():
            assert digest == sha256_of_file(Path(path))
        assert set(details["metrics"]) == ({"pass@1", "pass@3"} if task in ("gsm8k", "humaneval") else {"acc"})
    assert whole["tasks"]["humaneval"]["details"]["code_execution"] in ("bubblewrap", "landlock+seccomp")
    values = [score["value"] for score in whole["tasks"].values()]
    assert whole["average"]["value"] == pytest.approx(sum(values) / 5)
    assert whole["average"]["is_the_papers"] is True
    kept = [path for path in (run.path / "eval").glob("*.json") if "limit" not in path.name and "paper" in path.name]
    assert read_json(kept[0], "measure again") == json.loads(json.dumps(whole))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_batches_do_not_change_numbers(made, whole, batch, samples, tmp_path):
    run, data = made
    out = tmp_path / "samples.jsonl"
    again = evaluated(run, "arc_easy,mmlu,gsm8k", data, batch=batch, fresh=True, samples_out=out, **QUICK)
    assert numbers(again) == {task: found for task, found in numbers(whole).items() if task in again["tasks"]}
    assert_same_answers(out, samples)


def test_two_processes_with_uneven_documents_give_the_same(made, whole, samples, tmp_path):
    run, data = made
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("eval"))
    from lapcli.runs import read_run

    out = tmp_path / "samples.jsonl"
    assert evaluate_in_processes(2, read_run(copy), PAPER, data, samples_out=out, **QUICK) == 0
    assert_same_answers(out, samples)
    (kept,) = (copy / "eval").glob("*.json")
    result = json.loads(kept.read_text())
    assert result["world_size"] == 2
    assert numbers(result) == numbers(whole)
    journals = {path.name for path in (copy / "eval").rglob("process-*.jsonl")}
    assert journals == {"process-0.jsonl", "process-1.jsonl"}
    # Fewer documents than processes.
    assert evaluate_in_processes(2, read_run(copy), "arc_easy,gsm8k", data, limit=1, **QUICK) == 0
    (kept,) = (copy / "eval").glob("*limit1*.json")
    assert [score["count"] for score in json.loads(kept.read_text())["tasks"].values()] == [1, 1]


def test_killed_and_resumed(made, whole, samples, tmp_path, capsys):
    run, data = made
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy, ignore=shutil.ignore_patterns("eval"))
    from lapcli.runs import read_run

    assert evaluate_in_processes(1, read_run(copy), PAPER, data, die_after=20, **QUICK) == -9  # in the middle of gsm8k
    results = {path.parent.name.rpartition("-")[0] for path in (copy / "eval").rglob("result.json")}
    assert results == {"arc_easy", "arc_challenge", "mmlu"}
    assert not list((copy / "eval").glob("*.json"))
    capsys.readouterr()
    out = tmp_path / "samples.jsonl"
    resumed = evaluated(read_run(copy), PAPER, data, samples_out=out, **QUICK)
    said = capsys.readouterr().err
    assert "mmlu: 6 saved answers are reused" in said
    assert "gsm8k: 2 saved answers are reused" in said
    assert numbers(resumed) == numbers(whole)
    assert_same_answers(out, samples)
    # Other settings find nothing of it.
    evaluated(read_run(copy), "gsm8k", data, **{**QUICK, "seed": 5})
    assert "already" not in capsys.readouterr().err


def test_without_any_network(made, whole):
    """In an empty network namespace, and nobody told the hub's library that it is offline."""
    alone = next((way for way in (["unshare", "-n"], ["unshare", "-rn"]) if _works([*way, "true"])), None)
    if alone is None:
        pytest.skip("this system lets nobody make a network namespace")
    run, data = made
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    options = ["--run", str(run.path), "--tasks", PAPER, "--data", str(data), "--fresh", "--json"]
    for name, value in QUICK.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    command = [*alone, sys.executable, "-m", "lapcli", "eval", *options]
    done = run_process(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert numbers(json.loads(done.stdout)) == numbers(whole)


def _works(command):
    try:
        return run_process(command, capture_output=True).returncode == 0
    except OSError:
        return False


def test_samples_and_prompts(made, whole, tmp_path, capsys):
    run, data = made
    out = tmp_path / "samples.jsonl"
    evaluated(run, "arc_easy,gsm8k", data, samples_out=out, show_prompt=1, **QUICK)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["arc_easy"] * 7 + ["gsm8k"] * 5
    for line in lines:
        assert line["prompt"].startswith("<|bos|><|user_start|>")
        assert line["prompt"].endswith("<|user_end|><|assistant_start|>")
    assert [len(line["answers"]) for line in lines[:4]] == [4, 4, 3, 5]
    assert [len(line["answers"]) for line in lines[7:]] == [3] * 5
    for line in lines[7:]:
        passed = [verdict["passed"] for verdict in line["verdicts"][0]]
        assert passed == [f"#### {line['target'].rpartition('#### ')[2]}" in answer for answer in line["answers"]]
    shown = capsys.readouterr().err
    assert lines[0]["prompt"] in shown
    assert lines[7]["prompt"] in shown
    assert lines[1]["prompt"] not in shown
    scored = [line["scores"]["acc"] for line in lines[:7]]
    assert sum(scored) / 7 == whole["tasks"]["arc_easy"]["value"]


def test_harness_prompts_are_lm_evals(made, base, tmp_path):
    _, data = made
    out = tmp_path / "samples.jsonl"
    result = evaluated(base, "arc_easy,mmlu,gsm8k", data, limit=2, samples_out=out)
    assert result["protocol"] == "harness"  # the default of a base run
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    by_task = {line["task"]: line for line in reversed(lines)}
    arc = by_task["arc_easy"]
    assert arc["prompt"].startswith("Question: Which ")
    assert arc["prompt"].endswith("\nAnswer:")
    assert [choice[0] for choice in arc["choices"]] == [" "] * 4
    mmlu = by_task["mmlu_astronomy"]
    assert mmlu["prompt"].startswith("The following are multiple choice questions (with answers) about astronomy.\n\n")
    assert mmlu["choices"] == [" A", " B", " C", " D"]
    assert by_task["gsm8k"]["prompt"].count("Question:") == 6  # five examples
    assert set(result["tasks"]["gsm8k"]["details"]["metrics"]) == {
        "exact_match (strict-match)",
        "exact_match (flexible-extract)",
    }
    assert result["tasks"]["mmlu"]["count"] == 4
    assert set(result["tasks"]["arc_easy"]["details"]["metrics"]) == {"acc", "acc_norm"}


def test_bits_per_byte_of_held_out_text(base, tmp_path):
    from harness_support import tiny_model, tiny_tokenizer

    (tmp_path / "some.txt").write_text("the cat sat on a mat")
    (tmp_path / "more.txt").write_text("one dog")
    found = evaluated(base, "bpb", tmp_path)["tasks"]["bpb"]
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer.vocab_size)
    nats = 0.0
    for text in ("the cat sat on a mat", "one dog"):
        ids = tokenizer.encode(text)
        logits = model(torch.tensor([[tokenizer.bos, *ids[:-1]]]))[0].double().log_softmax(-1)
        nats -= float(logits[range(len(ids)), ids].sum().detach())
    assert found["value"] == pytest.approx(nats / (torch.log(torch.tensor(2.0)).item() * 27), rel=1e-4)
    assert found["count"] == 2


@pytest.mark.parametrize(
    ("tasks", "options", "said"),
    [
        ("gsm8k", {"temperature": 0.0}, "are the same; use --samples 1"),
        ("gsm8k", {"protocol": "paper1"}, "--protocol takes paper or harness"),
        ("gsm8k", {"protocol": "harness", "samples": 3}, "--samples has no effect with --protocol harness"),
        ("hellaswag", {}, "other tasks need --protocol harness"),
        ("bpb", {}, "give --data DIR with text files"),
    ],
)
def test_wrong_use_is_one_sentence(made, tasks, options, said):
    with pytest.raises(UsageError) as error:
        evaluated(made[0], tasks, None, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_what_a_base_run_cannot_do(base, made):
    for tasks, options, said in (
        ("arc_easy", {"protocol": "paper"}, "use --protocol harness"),
        ("spelling", {}, "use the run of `lap sft`"),
    ):
        with pytest.raises(UsageError, match=said):
            evaluated(base, tasks, made[1], **options)


@pytest.mark.parametrize("tasks", ["arc_easy", "gsm8k"])
def test_diverged_weights_are_an_error(made, tmp_path, tasks):
    run = make_run(tmp_path / "runs", damage=True)
    with pytest.raises(LapError, match="not finite"):
        evaluated(run, tasks, made[1], **QUICK)


def test_options_of_other_kinds_are_refused(tmp_path, capsys):
    from image_support import TINY_IMAGES

    from lapcli.recipe import recipe_from_dict
    from lapcli.runs import open_run

    open_run(tmp_path, "images", recipe_from_dict(TINY_IMAGES)).update(status="finished")
    code, _, err = run_main(capsys, "eval", "--runs-dir", str(tmp_path), "--run", "images", "--samples", "3")
    assert code == 2
    assert "--samples has no effect for a run of classification" in err


def test_the_table(made, whole, capsys):
    run, data = made
    options = ["--samples", "3", "--max-new-tokens", "6", "--data", str(data)]
    code, out, err = run_main(
        capsys, "eval", "--runs-dir", str(run.path.parent), "--run", "chat", "--tasks", PAPER, *options
    )
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()]
    arc = whole["tasks"]["arc_easy"]
    assert ["arc_easy", "acc", f"{arc['value']:.2%}", f"{arc['details']['stderr']:.2%}", "7"] in rows
    assert any(row[:1] == ["average"] and f"{whole['average']['value']:.2%}" in row for row in rows)
    assert "the paper gives neither temperature" in out
    assert "saved answers are reused" in err


def test_the_chat_quickstart_end_to_end(chat_runs, tmp_path, capsys):
    runs, _ = chat_runs
    options = ["--tasks", "spelling", "--limit", "3", "--samples", "2", "--max-new-tokens", "12", "--json"]
    code, out, err = run_main(capsys, "eval", "--runs-dir", str(runs), *options)
    assert code == 0, err
    result = json.loads(out)
    assert result["limit"] == 3
    assert result["tasks"]["spelling"]["count"] == 3
    assert set(result["tasks"]["spelling"]["details"]["metrics"]) == {"pass@1", "pass@2"}


@pytest.mark.slow
def test_any_task_of_lm_eval_with_its_data_from_the_hubs_cache(base, tmp_path, monkeypatch):
    """SciQ, of which `lap` knows nothing: lm-eval finds the definition, and the hub's library what it has on disk.

    The score is that of the likeliest answer by one whole forward for each, with the prompt as SciQ's authors have it.
    """
    words = [["stone", "cloud", "heat", "light"], ["wood", "salt", "rain", "iron"], ["sand", "fire", "snow", "water"]]
    answers = [[row[(place + turn) % 4] for place in range(4)] for turn in range(4) for row in words]
    rows = {
        "support": ["Plants need light.", "", "Rivers carry water."] * 4,
        "question": ["What do plants need?", "Which is a metal?", "What do rivers carry?"] * 4,
        "correct_answer": [row[3] for row in answers],
        **{f"distractor{n + 1}": [row[n] for row in answers] for n in range(3)},
    }
    files = {split: tmp_path / f"{split}.parquet" for split in ("train", "validation", "test")}
    for file in files.values():
        datasets.Dataset.from_dict(rows).to_parquet(file)
    names = {split: str(file) for split, file in files.items()}
    datasets.load_dataset("parquet", data_files=names, cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made").rglob("dataset_info.json")
    kept = tmp_path / "hub" / "allenai___sciq" / "default" / "0.0.0" / "c0ffee"
    shutil.copytree(made.parent, kept)
    for file in kept.glob("*.arrow"):
        file.rename(kept / file.name.replace("parquet", "sciq"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    score = evaluated(base, "sciq", None, protocol="harness")["tasks"]["sciq"]
    tokenizer = Tokenizer.from_file(base.path / "tokenizer.json")
    model, right = tiny_model(tokenizer.vocab_size), 0
    for support, question, choices in zip(rows["support"], rows["question"], answers, strict=True):
        context = [tokenizer.bos, *tokenizer.encode(f"{support}\nQuestion: {question}\nAnswer:")]
        likelihoods = []
        for choice in choices:
            ids = [*context, *tokenizer.encode(f" {choice}")]
            logprobs = model(torch.tensor([ids])).detach()[0].double().log_softmax(-1)
            likelihoods.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(context), len(ids))))
        right += likelihoods.index(max(likelihoods)) == 3
    assert 0 < right < 12  # or any answer would do
    assert (score["count"], score["value"]) == (12, pytest.approx(right / 12))
    with pytest.raises(LapError, match="could not load piqa"):
        evaluated(base, "piqa", None, protocol="harness")
    with pytest.raises(UsageError, match="did you mean sciq"):
        evaluated(base, "scique", None, protocol="harness")
    with pytest.raises(UsageError, match="no task 'doc_to_text'"):  # a word of its files that names no task
        evaluated(base, "doc_to_text", None, protocol="harness")
    theirs, ours = set(_index().all_tasks), _lm_eval_names()
    assert theirs <= ours  # what is refused without asking lm-eval is indeed no task of its
    assert len(ours - theirs) < 10  # such as a task list's item that no file defines; lm-eval is asked about these
    for name in sorted(ours - theirs)[:1]:
        with pytest.raises(UsageError, match="nor one of lm-eval's"):
            evaluated(base, name, None, protocol="harness")
