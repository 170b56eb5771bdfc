"""lm-eval's own HFLM over the same weights: an independent implementation."""

import pytest
import torch
from export_support import gpt_run
from harness_support import QUOTING, write_benchmarks
from lm_eval import evaluator

from lapcli.evaluation.adapter import LapLM, Workers
from lapcli.evaluation.benchmarks import BENCHMARKS
from lapcli.evaluation.tasks import Request
from lapcli.export.export import export_run
from lapcli.objectives.weights import find_checkpoint, open_run
from lapcli.runtime.ranks import World

pytest.importorskip("transformers", reason="lm-eval's HFLM needs it; the dev extra has it")
pytest.importorskip("accelerate", reason="lm-eval's HFLM needs it; the dev extra has it")
from lm_eval.models.huggingface import HFLM

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_benchmarks(tmp_path_factory.mktemp("stock"))


def answers(lm, task, data):
    prepared = BENCHMARKS[task].lm_eval_task(Request(None, [task], data))
    results = evaluator.evaluate(lm=lm, task_dict=prepared.loaded, limit=3 if task == "gsm8k" else None)
    found = {}
    for name, samples in results["samples"].items():
        for sample in samples:
            if QUOTING not in sample["arguments"][0][0]:  # transformers reads a quoted special token as the token
                found[name, sample["doc_id"], sample["filter"]] = [
                    answer for each in sample["resps"] for answer in each
                ]
    return found, results


def both(laplacian_heads, folder, context=128):
    """Our adapter, and lm-eval's own on the exported folder of the same run."""
    run = gpt_run(folder, chat=False, laplacian_heads=laplacian_heads, context=context)
    model, tokenizer = open_run(run, find_checkpoint(run, "last"), torch.device("cpu")).language_model()
    exported = str(export_run(run, "hf", verified=False).folder)
    theirs = HFLM(pretrained=exported, trust_remote_code=True, dtype="float32", batch_size=4, device="cpu")
    workers = Workers(World(0, 1, torch.device("cpu")))
    return LapLM(model, tokenizer, workers, task="task", seed=0, batch=3), theirs


@pytest.mark.parametrize("laplacian_heads", [0, 1])
def test_log_likelihoods_of_three_stock_tasks(laplacian_heads, data, tmp_path):
    ours, theirs = both(laplacian_heads, tmp_path)
    for task in ("arc_easy", "arc_challenge", "mmlu"):
        (mine, _), (expected, _) = answers(ours, task, data), answers(theirs, task, data)
        assert mine.keys() == expected.keys()
        for key, found in mine.items():
            assert [p for p, _ in found] == pytest.approx([p for p, _ in expected[key]], abs=1e-4)
            assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected[key]]


def test_truncated_contexts(data, tmp_path):
    ours, theirs = both(1, tmp_path, context=24)
    (mine, _), (expected, _) = answers(ours, "arc_easy", data), answers(theirs, "arc_easy", data)
    assert ours.truncated > 3
    for key, found in mine.items():
        assert [p for p, _ in found] == pytest.approx([p for p, _ in expected[key]], abs=1e-4)


def test_greedy_answers_of_gsm8k(data, tmp_path):
    ours, theirs = both(1, tmp_path, context=512)
    (mine, results), (expected, reference) = answers(ours, "gsm8k", data), answers(theirs, "gsm8k", data)
    assert mine == expected
    assert results["results"] == reference["results"]
