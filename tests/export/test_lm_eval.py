"""lm-eval's own `hf` model over an exported folder, and `lap eval --protocol harness` over its run, on real files."""

import json

import pytest
import torch
from export_support import gpt_run
from support import run_main

pytest.importorskip("transformers", reason="lm-eval's HFLM needs it; the dev extra has it")
pytest.importorskip("accelerate", reason="lm-eval's HFLM needs it; the dev extra has it")

torch.set_num_threads(1)
pytestmark = pytest.mark.slow  # transformers and lm-eval, each over the same documents


def of_lap(runs, task, data, limit, tmp_path, capsys):
    """The answers to each document by the command."""
    file = tmp_path / f"{task.replace(',', '+')}.jsonl"
    options = ["--protocol", "harness", "--data", str(data), "--limit", str(limit), "--samples-out", str(file)]
    code, _, err = run_main(capsys, "eval", "--run", "gpt", "--tasks", task, *options, "--runs-dir", str(runs))
    assert code == 0, err
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["task"], row["document"]): row["answers"] for row in rows}


def of_lm_eval(folder, task, data, limit):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from lapcli.evaluation.benchmarks import BENCHMARKS
    from lapcli.evaluation.benchmarks.benchmark import BenchmarkRequest, BenchmarkSettings

    request = BenchmarkRequest(limit, BenchmarkSettings("harness"), data, False, lambda *_: None)
    loaded = BENCHMARKS[task].lm_eval_task(request).loaded
    model = HFLM(pretrained=str(folder), trust_remote_code=True, dtype="float32", batch_size=4, device="cpu")
    samples = evaluator.evaluate(lm=model, task_dict=loaded, limit=limit)["samples"]
    return {
        (name, sample["doc_id"]): [answer for each in sample["resps"] for answer in each]
        for name, rows in samples.items()
        for sample in rows
    }


@pytest.fixture(scope="module", params=[0, 3], ids=["native", "laplacian"])
def exported(request, tmp_path_factory):
    from lapcli.export.export import export_run

    runs = tmp_path_factory.mktemp("runs")
    run = gpt_run(runs, chat=False, laplacian_heads=request.param, context=512)
    return runs, export_run(run, "hf", verified=False).folder


@pytest.mark.parametrize(("task", "limit"), [("arc_challenge", 12), ("mmlu", 1)])
def test_log_likelihoods_document_by_document(exported, task, limit, test_data, tmp_path, capsys):
    runs, folder = exported
    mine = of_lap(runs, task, test_data, limit, tmp_path, capsys)
    theirs = of_lm_eval(folder, task, test_data, limit)
    assert mine.keys() == theirs.keys()
    assert len(mine) >= 12
    for document, answers in mine.items():
        assert len(answers) >= 3
        assert [p for p, _ in answers] == pytest.approx([p for p, _ in theirs[document]], abs=1e-4)


def test_greedy_answers(exported, test_data, tmp_path, capsys):
    runs, folder = exported
    assert of_lap(runs, "gsm8k", test_data, 2, tmp_path, capsys) == of_lm_eval(folder, "gsm8k", test_data, 2)
