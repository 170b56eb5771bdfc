"""Processes for the tests: the `lap` command, and children that train a tiny recipe and can be killed.

Children come from a fork server that has torch imported, so that one costs a tenth of a second, not four.
"""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
LOG = "child.log"  # in the runs folder: what the last child said

TINY = {
    "objective": "language_model",
    "model": {"layers": 2, "width": 32, "heads": 4, "context": 32, "laplacian_heads": 2},
    "tokenizer": {"vocab": 300},
    "data": {"train": "TEXT", "validation": 0.2},
    "train": {"steps": 10, "batch": 8, "micro_batch": 4, "threads": 1},
    "validation": {"every": 4, "tokens": 256, "prompts": ["once"], "sample_tokens": 4},
    "checkpoint": {"every": 3, "keep": 3},
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "sklearn.datasets",
        "lapcli.training.start",
        "lapcli.objectives.classification",
        "lapcli.evaluation.harness.run",
        "support",
        "harness_support",
    ]
)


def lap(
    *arguments: str, cache: Path | None = None, environment: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, as a user would, but for the imports that the fork server has done."""
    given = {**os.environ, **({"LAP_CACHE": str(cache)} if cache else {}), **(environment or {})}
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = _context.Process(target=_command, args=(arguments, given, str(out), str(err)))
        child.start()
        code = exit_code(child, timeout)
        return subprocess.CompletedProcess(["lap", *arguments], code, out.read_text(), err.read_text())


def _command(arguments: tuple[str, ...], environment: dict[str, str], out: str, err: str) -> None:
    for path, descriptor in ((os.devnull, 0), (out, 1), (err, 2)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = [str(ROOT / "lapcli" / "__main__.py"), *arguments]
    from lapcli.cli import main

    main()


def tiny_recipe(text: Path, **sections: dict[str, Any]):
    """The tiny recipe on a text file, with some keys of some sections replaced."""
    from lapcli.recipe import recipe_from_dict

    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in TINY.items()}
    merged["data"]["train"] = str(text)
    for name, keys in sections.items():
        merged[name] = {**merged.get(name, {}), **keys} if isinstance(keys, dict) else keys
    return recipe_from_dict(merged)


# `lap sft recipes/chat_quickstart.yaml` in seconds.
CHAT_CUT = [
    *("--set", "stages.midtrain.train.steps=3", "--set", "stages.midtrain.validation.tokens=1024"),
    *("--set", "stages.sft.train.steps=3", "--set", "stages.sft.validation.rows=8"),
    *("--set", "stages.sft.train.batch=8", "--set", "stages.sft.train.micro_batch=8"),
    *("--set", "stages.midtrain.train.batch=4", "--set", "stages.midtrain.train.micro_batch=4"),
    *("--set", "stages.sft.validation.sample_tokens=8"),
]

TINY_STAGE = {
    "train": {"steps": 6, "batch": 4, "micro_batch": 2, "threads": 1},
    "optimizer": {"lr_scale": 0.5},
    "checkpoint": {"every": 2, "keep": 2},
    "skip_malformed": False,
}


def tiny_chat_recipe(folder: Path, **stages: dict[str, Any]):
    """Two small stages on conversations in `folder`, with some keys of some stages replaced."""
    import json

    from lapcli.recipe import recipe_from_dict

    path = folder / "chats.jsonl"
    if not path.exists():
        words = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran"]
        rows = [
            [
                {"role": "user", "content": " ".join(words[n % 7 : n % 7 + n % 3 + 1])},
                {"role": "assistant", "content": " ".join(words[n % 5 : n % 5 + n % 4 + 1])},
            ]
            for n in range(40)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mixture = [{"name": "chats", "format": "conversations", "source": str(path)}]
    validation = {"every": 4, "mixture": mixture, "tokens": 128, "rows": 8}
    given: dict[str, Any] = {
        "midtrain": {**TINY_STAGE, "mixture": mixture, "loss": "all", "batching": "packed", "validation": validation},
        "sft": {
            **TINY_STAGE,
            "mixture": mixture,
            "loss": "assistant",
            "batching": "padded",
            "validation": {**validation, "prompts": ["what?"], "sample_tokens": 4},
        },
    }
    for name, changes in stages.items():
        for key, value in changes.items():
            merged = {**given[name].get(key, {}), **value} if isinstance(value, dict) else value
            given[name][key] = merged
    return recipe_from_dict({"objective": "chat", "stages": given})


def write_text(path: Path) -> Path:
    """A few hundred lines with some structure to learn."""
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "round", "and", "round", "it"]
    lines = [" ".join(words[(i * i + j * (i % 5 + 1)) % len(words)] for j in range(12)) for i in range(600)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train_here(recipe: Any, runs: Path, name: str = "run", log: IO[str] | None = None) -> Any:
    """Trains in this process; what it would show goes to `log`."""
    from rich.console import Console

    from lapcli.training.start import train_recipe

    console = Console(file=log or io.StringIO(), soft_wrap=True)
    return train_recipe(recipe, runs_dir=runs, name=name, console=console)


def start_child(
    recipe: Any, runs: Path, cache: Path, before: Callable[..., None] | None = None, *extra: Any
) -> BaseProcess:
    """Starts a child that trains `recipe` as `lap train` would; `before(*extra)` runs in it first."""
    from lapcli.recipe import recipe_to_dict

    child = _context.Process(target=_child, args=(recipe_to_dict(recipe), str(runs), str(cache), before, extra))
    child.start()
    return child


def exit_code(child: BaseProcess, seconds: float = 120) -> int:
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        raise AssertionError("the child did not end in time")
    return child.exitcode


def _child(recipe: dict, runs: str, cache: str, before: Callable[..., None] | None, extra: tuple) -> None:
    os.environ["LAP_CACHE"] = cache
    from lapcli.errors import LapError
    from lapcli.recipe import recipe_from_dict

    randomise_weights()
    if before is not None:
        before(*extra)
    Path(runs).mkdir(exist_ok=True)
    with (Path(runs) / LOG).open("w") as log:
        try:
            train_here(recipe_from_dict(recipe), Path(runs), log=log)
        except LapError as error:
            print(error, file=log)
            sys.exit(int(error.exit_code))


def randomise_weights() -> None:
    """Every weight is drawn: with the recipe's zero output projections Laplacian heads would do nothing at first."""
    import torch

    from lapcli.models.gpt import GPT

    zeros = GPT.initialise

    def initialise(self, generator=None):
        zeros(self, generator)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1, generator=generator)

    GPT.initialise = initialise


def die_at(point: str, times: int) -> None:
    """SIGKILL to ourselves when the checkpoint reaches `point` for the `times`-th time."""
    from lapcli.training import checkpoint

    seen = 0

    def reached(name: str) -> None:
        nonlocal seen
        seen += name == point
        if seen == times and name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.reached = reached


def die_in_update(step: int) -> None:
    """SIGKILL to ourselves in the middle of an update, after the first parameters have changed."""
    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step
    done = 0

    def update(self) -> None:
        nonlocal done
        done += 1
        if done == step:
            self._optimizers[0].step()
            os.kill(os.getpid(), signal.SIGKILL)
        before(self)

    Optimizers.step = update


def run_main(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit code, stdout, stderr."""
    from unittest.mock import patch

    from lapcli.cli import main

    capsys.readouterr()
    code: Any = 0
    with patch.object(sys, "argv", ["lap", *arguments]):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err
