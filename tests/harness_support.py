"""A tiny GPT with random weights as a finished run, benchmark files of a few rows, and processes that evaluate."""

import gzip
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
from support import exit_code, process, ranks, tiny_recipe, write_text

from lapcli import checkpoint
from lapcli.data.text.tokenizer import Tokenizer, train_tokenizer
from lapcli.models.gpt import GPT, GPTConfig
from lapcli.runs import Run, open_run, read_run

WORDS = ["water", "plant", "light", "stone", "metal", "cloud", "heat", "energy", "animal", "river"]
QUOTING = "What does <|user_end|><|assistant_start|> mean?"  # text, not tokens


def tiny_tokenizer() -> Tokenizer:
    """Letters after a space are single tokens too, as lm-eval's MMLU requires."""
    text = " A B C D E" * 20 + " ".join(WORDS * 10) + "\nQuestion: Answer: The following are multiple choice\n" * 5
    return train_tokenizer([text], 320, max_chars=10**6, crop=10**6)


SHAPE = {"layers": 2, "width": 32, "heads": 2, "context": 128, "laplacian_heads": 1}


def tiny_model(vocab: int, seed: int = 0, **shape: Any) -> GPT:
    model = GPT(GPTConfig(vocab=vocab, **{**SHAPE, **shape}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if p is model.embed.weight else 0.2))
    return model.eval()


def make_run(
    runs: Path, objective: str = "chat", *, name: str | None = None, seed: int = 0, damage: bool = False, **shape: Any
) -> Run:
    """The files left by training: recipe, tokenizer, a checkpoint, status finished."""
    from lapcli.recipe import recipe_from_dict
    from lapcli.recipe.chat import stage_recipe

    runs.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    text = write_text(runs / "text.txt")
    base = tiny_recipe(text, model={**SHAPE, **shape}, tokenizer={"vocab": tokenizer.vocab_size})
    recipe: Any = base
    if objective == "chat":
        stage = {
            "mixture": [{"name": "x", "format": "conversations", "source": "x.jsonl"}],
            "loss": "assistant",
            "batching": "padded",
            "train": {"steps": 1, "batch": 1, "micro_batch": 1},
        }
        chat = recipe_from_dict({"objective": "chat", "stages": {"sft": stage}})
        recipe = stage_recipe(chat, "sft", base.model, base.tokenizer, None)
    run = open_run(runs, name or objective, recipe)
    model = tiny_model(tokenizer.vocab_size, seed, **shape)
    if damage:
        with torch.no_grad():
            model.blocks[0].mlp.up.weight.fill_(3e38)  # finite, but no product with it is
    metadata = {"laplacian_heads": str(model.config.head_plan()), "tokenizer_sha256": tokenizer.sha256}
    saved = checkpoint.save(run.checkpoints, 1, model.state_dict(), {"x": torch.zeros(1)}, metadata, {}, keep=1)
    tokenizer.save(run.path / "tokenizer.json")
    known = {"weights_sha256": saved.weights_sha256, "tokenizer_sha256": tokenizer.sha256}
    run.update(status="finished", step=1, **known)
    return read_run(run.path)


def arc_rows(count: int = 7) -> list[dict[str, Any]]:
    """Labels A to D, 1 to 4, three options, five options; a question that quotes special tokens."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        labels = ["ABCD", "1234", "ABC", "ABCDE"][number % 4]
        stem = QUOTING if number == 2 else f"Which {draw.choice(WORDS)} has more {draw.choice(WORDS)} number {number}?"
        texts = [" ".join(draw.sample(WORDS, draw.randint(1, 3))) for _ in labels]
        choices = {"text": texts, "label": list(labels)}
        rows.append({"id": f"q{number}", "question": stem, "choices": choices, "answerKey": draw.choice(labels)})
    return rows


def humaneval_rows() -> list[dict[str, str]]:
    return [
        {
            "task_id": f"Test/{n}",
            "prompt": f"from typing import List\n\n\ndef add_{n}(a, b):\n    '''Sum and {n}.'''\n",
            "canonical_solution": f"    return a + b + {n}\n",
            "test": f"def check(candidate):\n    assert candidate(1, 2) == {3 + n} and candidate(0, 0) == {n}\n",
            "entry_point": f"add_{n}",
        }
        for n in range(2)
    ]


def write_benchmarks(folder: Path) -> Path:
    """Every benchmark in the hub's form, with a few rows."""

    def write(place: str, rows: list[dict[str, Any]]) -> None:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text("".join(json.dumps(row) + "\n" for row in rows))

    for name, count in (("ARC-Easy", 7), ("ARC-Challenge", 5)):
        write(f"arc/{name}/test.jsonl", arc_rows(count))
    for split, count in (("test", 3), ("dev", 2)):
        rows = [
            {"question": f"{subject} {n}, which?", "subject": subject, "choices": WORDS[n : n + 4], "answer": n % 4}
            for subject in ("astronomy", "virology")
            for n in range(count)
        ]
        write(f"mmlu/all/{split}.jsonl", rows)
    for split, count in (("test", 5), ("train", 6)):
        rows = [
            {"question": f"What is {n} and {n}?", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
            for n in range(count)
        ]
        write(f"gsm8k/main/{split}.jsonl", rows)
    (folder / "humaneval").mkdir()
    with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in humaneval_rows())
    return folder


QUICK = {"set": ["sampling.samples=3", "sampling.max_tokens=6"]}


def evaluated(
    run: Run, tasks: str, data: Path | None, *, limit: int | None = None, batch: int | None = None, **options
):
    """`evaluate_run` as a dictionary."""
    from lapcli.evaluation.run_tasks import evaluate_run
    from lapcli.evaluation.tasks import new_request
    from lapcli.objectives.weights import find_checkpoint

    request = new_request(run, tasks, batch=batch, data=data, limit=limit, **options)
    return evaluate_run(request, find_checkpoint(run, "last"))


def samples_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Every prompt with its answers and verdicts."""
    files = dict.fromkeys(score["details"]["samples"] for score in result["tasks"].values())
    return [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """The results that must not depend on batches, processes and interruptions."""
    return {
        task: (score["value"], score["count"], score["details"]["metrics"]) for task, score in result["tasks"].items()
    }


def evaluate_in_processes(count: int, run: Run, tasks: str, data: Path, **options: Any) -> int:
    """The exit code of rank 0; the result is stored in the run."""
    children = [process(_evaluate, world, str(run.path), tasks, str(data), options) for world in ranks(count)]
    for child in children:
        child.start()
    codes = [exit_code(child, 600) for child in children]
    return codes[0]


def _evaluate(environment: dict[str, str], run: str, tasks: str, data: str, options: dict[str, Any]) -> None:
    os.environ.update(environment)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    die_after = options.pop("die_after", None)
    if die_after is not None:
        _die_after(die_after)
    limit = options.pop("limit", None)
    evaluated(read_run(Path(run)), tasks, Path(data), limit=limit, **options)


def _die_after(lines: int) -> None:
    """Send SIGKILL to this process after this many documents, in the middle of writing the next."""
    from lapcli.evaluation.journal import Journal

    before = Journal.add
    written = 0

    def add(self: Journal, key: str, value: Any) -> None:
        nonlocal written
        written += 1
        if written > lines:
            assert self._file is not None
            self._file.write('{"key": "torn')
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        before(self, key, value)

    Journal.add = add  # type: ignore[method-assign]
