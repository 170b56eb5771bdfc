"""lm-eval's own `hf` model over an exported folder, and `lap eval --protocol harness` over its run, on real files."""

import json

import pytest
import torch
from export_support import gpt_run
from harness_support import samples_of
from support import run_main

pytest.importorskip("transformers", reason="lm-eval's HFLM needs it; the dev extra has it")
pytest.importorskip("accelerate", reason="lm-eval's HFLM needs it; the dev extra has it")

torch.set_num_threads(1)
pytestmark = pytest.mark.slow  # transformers and lm-eval, each over the same documents


def of_lap(runs, task, data, limit, capsys):
    """The answers to each document by the command."""
    options = ["--protocol", "harness", "--data", str(data), "--limit", str(limit), "--json"]
    code, out, err = run_main(capsys, "eval", "--run", "gpt", "--tasks", task, *options, "--runs-dir", str(runs))
    assert code == 0, err
    return {(row["task"], row["document"]): row["answers"] for row in samples_of(json.loads(out))}


def of_lm_eval(folder, task, data, limit):
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    from lapcli.evaluation.benchmarks import BENCHMARKS
    from lapcli.evaluation.tasks import Request

    loaded = BENCHMARKS[task].lm_eval_task(Request(None, [task], data)).loaded
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
def test_log_likelihoods_document_by_document(exported, task, limit, test_data, capsys):
    runs, folder = exported
    mine = of_lap(runs, task, test_data, limit, capsys)
    theirs = of_lm_eval(folder, task, test_data, limit)
    assert mine.keys() == theirs.keys()
    assert len(mine) >= 12
    for document, answers in mine.items():
        assert len(answers) >= 3
        assert [p for p, _ in answers] == pytest.approx([p for p, _ in theirs[document]], abs=1e-4)


def test_greedy_answers(exported, test_data, capsys):
    runs, folder = exported
    assert of_lap(runs, "gsm8k", test_data, 2, capsys) == of_lm_eval(folder, "gsm8k", test_data, 2)
