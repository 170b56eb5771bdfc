"""Processes for the tests: the `lap` command, and children that train a tiny recipe and can be killed.

Children come from a fork server that has imported torch, so that each takes 0.1 s instead of 4 s.
"""

import contextlib
import ctypes
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import pytest

ROOT = Path(__file__).parent.parent
PR_SET_PDEATHSIG = 1  # of Linux's prctl
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

#: Seconds after which a process counts as hanging, even on a busy machine: a guard, never an expectation.
HANG = 900.0

#: Whether `--quick` was given (`make check`).
quick = False

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "sklearn.datasets",
        "lapcli.training.train",
        "lapcli.objectives.classification",
        "lapcli.evaluation.language_tasks",
        "lapcli.objectives.self_supervised",
        "support",
        "harness_support",
    ]
)


def wait_until(what: Callable[[], bool], told: Callable[[], object] = str) -> None:
    """Wait until `what()` holds, even on a busy machine; otherwise fail with the output of `told()`."""
    deadline = time.monotonic() + HANG
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it hangs: {HANG:g} seconds and it has not come to that {told()}")
        time.sleep(0.02)


class Command:
    """`lap ARGUMENTS` in a separate process, as a user would start it, except that imports are done already."""

    def __init__(
        self, arguments: tuple[str, ...], environment: dict[str, str], asked: str = "", pauses: bool = False
    ) -> None:
        self.arguments = arguments
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name) / name for name in ("in", "out", "err")]
        self.files[0].write_text(asked)
        self.child = process(_command, arguments, environment, [str(file) for file in self.files], pauses)
        self.child.start()

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Wait until `what()` holds, while the command runs."""

        def holds() -> bool:
            done = what()
            assert done or self.child.is_alive(), self.files[2].read_text()
            return done

        wait_until(holds)

    def send(self, kind: signal.Signals) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, kind)

    def press_ctrl_c(self) -> None:
        """Signal the command and its process group, as a terminal does; a paused command continues then."""
        assert self.child.pid is not None
        os.killpg(self.child.pid, signal.SIGINT)
        os.killpg(self.child.pid, signal.SIGCONT)

    def others(self) -> list[int]:
        """Processes that the command has started or left behind."""
        return [pid for pid in _session(self.child.pid) if pid != self.child.pid]

    def wait_for_pause(self) -> None:
        self.wait_for(lambda: _session(self.child.pid).get(self.child.pid) == "T")

    def wait_for_the_others(self) -> None:
        """Until none is left; its children would outlive the guard."""
        wait_until(lambda: not self.others(), self.others)

    def result(self, timeout: float = HANG) -> subprocess.CompletedProcess[str]:
        code = exit_code(self.child, timeout)
        out, err = (file.read_text() for file in self.files[1:])
        self.folder.cleanup()
        return subprocess.CompletedProcess(["lap", *self.arguments], code, out, err)


def start_lap(
    *arguments: str,
    cache: Path | None = None,
    environment: dict[str, str] | None = None,
    asked: str = "",
    pauses: bool = False,
) -> Command:
    """The command, running; `asked` is its standard input. `pauses`: in its first attention."""
    given = {**os.environ, **({"LAP_CACHE": str(cache)} if cache else {}), **(environment or {})}
    return Command(arguments, given, asked, pauses)


def lap(
    *arguments: str,
    cache: Path | None = None,
    environment: dict[str, str] | None = None,
    processes: int = 1,
    asked: str = "",
    timeout: float = HANG,
) -> subprocess.CompletedProcess[str]:
    """The command, ended; of several `processes`, the ranks that torchrun would start, what rank 0 said."""
    started = [
        start_lap(*arguments, cache=cache, environment={**(environment or {}), **rank}, asked=asked)
        for rank in ranks(processes)
    ]
    results = [command.result(timeout) for command in started]
    failed = [result for result in results if result.returncode]
    return failed[0] if failed else results[0]


def ranks(count: int) -> list[dict[str, str]]:
    """The variables that torchrun would set in each of these processes; none for a single process."""
    if count == 1:
        return [{}]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def run_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`; tests call it by this name, so that `make check` can leave them out."""
    skip_if_quick("it starts a process")
    return subprocess.run(command, **options)


def start_process(command: list[str], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen`, likewise."""
    skip_if_quick("it starts a process")
    return subprocess.Popen(command, **options)


def process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A child of the fork server, not yet started."""
    skip_if_quick("it starts a process")
    return _context.Process(target=target, args=arguments)


def skip_if_quick(reason: str) -> None:
    """Skips the test under `--quick`. A test that calls this in another thread has to be marked slow instead: the
    exception would end only that thread, and the test would wait for it."""
    if quick:
        pytest.skip(f"{reason}; `make test` runs it")


def _end_with_the_tests() -> None:
    """The fork server exits with the tests, however they end; without this its children would continue."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _session(number: int | None) -> dict[int, str]:
    """The processes of a session with their states, without zombies."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == number and state != "Z":
                    found[int(entry.name)] = state
    return found


def _pause_in_the_first_attention() -> None:
    from torch.nn import functional

    before = functional.scaled_dot_product_attention

    def attention(*arguments: Any, **options: Any) -> Any:
        functional.scaled_dot_product_attention = before
        os.kill(os.getpid(), signal.SIGSTOP)
        return before(*arguments, **options)

    functional.scaled_dot_product_attention = attention


def _command(arguments: tuple[str, ...], environment: dict[str, str], files: list[str], pauses: bool) -> None:
    _end_with_the_tests()
    os.setsid()  # a job of its own, as a shell would start it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
    if pauses:
        _pause_in_the_first_attention()
    for descriptor, path in enumerate(files):
        opened = os.open(path, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    # The fork server reads PYTHONPATH only once, and other packages are found through the path.
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder not in sys.path]
    os.chdir(ROOT)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = [str(ROOT / "lapcli" / "__main__.py"), *arguments]
    from lapcli.cli import main

    main()


def tiny_recipe(text: Path, **sections: dict[str, Any]):
    """The tiny recipe on a text file, with some keys replaced."""
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
}


def tiny_chat_recipe(folder: Path, **stages: dict[str, Any]):
    """Two small stages on conversations in `folder`, with some keys replaced."""
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
    """A few hundred lines with some learnable structure."""
    words = ["the", "cat", "sat", "on", "a", "mat", "while", "one", "dog", "ran", "round", "and", "round", "it"]
    lines = [" ".join(words[(i * i + j * (i % 5 + 1)) % len(words)] for j in range(12)) for i in range(600)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def train_here(recipe: Any, runs: Path, name: str = "run", log: IO[str] | None = None, fresh: bool = False) -> Any:
    """Trains in this process; its output goes to `log`."""
    skip_if_quick("it trains a run")
    from lapcli.runtime.progress import LogConsole
    from lapcli.training.train import train_recipe

    console = LogConsole(log or io.StringIO())
    return train_recipe(recipe, runs_dir=runs, name=name, fresh=fresh, console=console)


def built(objective: Any, recipe: Any, data: Any, world: Any, policy: Any = None) -> Any:
    """An objective of that class on opened data, as built by training."""
    ready = objective(recipe)
    ready.use(data, world)
    ready.build(world.device, policy)
    return ready


def staged(recipe: Any, stage: Any, base: Any) -> Any:
    """The recipe of a stage that starts from that run."""
    from lapcli.recipe.chat import stage_recipe
    from lapcli.training.stages import from_run

    given = from_run(base, base.path.parent / "elsewhere")  # by its path
    return stage_recipe(recipe, stage, base.recipe.model, base.recipe.tokenizer, given)


def edit_checkpoint(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the tensors of a file and update the hashes beside it."""
    import hashlib
    import json

    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with safe_open(folder / file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / file).items()}
    change(tensors)
    save_file(tensors, folder / file, metadata=metadata)
    state = json.loads((folder / "state.json").read_text())
    state["files"][file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(state))
    return folder / file


def start_child(
    recipe: Any,
    runs: Path,
    cache: Path,
    before: Callable[..., None] | None = None,
    *extra: Any,
    fresh: bool = False,
    environment: dict[str, str] | None = None,
) -> BaseProcess:
    """Starts a child that trains `recipe` as `lap train` would; `before(*extra)` runs in it first."""
    from lapcli.recipe import recipe_to_dict

    child = process(
        _child,
        recipe_to_dict(recipe),
        str(runs),
        {"LAP_CACHE": str(cache), **(environment or {})},
        before,
        extra,
        fresh,
    )
    child.start()
    return child


def exit_code(child: BaseProcess, seconds: float = HANG) -> int:
    child.join(seconds)
    if child.exitcode is None:
        child.kill()
        raise AssertionError(f"the child hangs: it did not end in {seconds:g} seconds")
    return child.exitcode


def _child(
    recipe: dict,
    runs: str,
    environment: dict[str, str],
    before: Callable[..., None] | None,
    extra: tuple,
    fresh: bool,
) -> None:
    _end_with_the_tests()
    os.environ.update(environment)
    from lapcli.recipe import recipe_from_dict
    from lapcli.runtime.errors import LapError

    randomise_weights()
    if before is not None:
        before(*extra)
    Path(runs).mkdir(exist_ok=True)
    with (Path(runs) / LOG).open("w") as log:
        try:
            train_here(recipe_from_dict(recipe), Path(runs), log=log, fresh=fresh)
        except LapError as error:
            print(error, file=log)
            sys.exit(int(error.exit_code))


def randomise_weights() -> None:
    """All weights are random: with zero output projections Laplacian heads would have no effect at first."""
    import torch

    from lapcli.models.gpt import GPT

    zeros = GPT.initialise

    def initialise(self, generator=None):
        zeros(self, generator)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.1, generator=generator)

    GPT.initialise = initialise


def at_points_of_a_save(act: Callable[[str], None], replace: Callable[..., None] = setattr) -> None:
    """Call `act` with the name of each point of a save at which a process may be killed."""
    from lapcli import checkpoint

    save_file, move = checkpoint.save_file, checkpoint.move

    def saving(tensors: Any, path: Path, metadata: Any = None) -> None:
        if path.name == "model.safetensors":
            act("folder made")
        save_file(tensors, path, metadata=metadata)
        act("model written" if path.name == "model.safetensors" else "optimizer written")

    def moving(path: Path, new: Path) -> None:
        if new.name.startswith("step-"):
            act("before rename")
        move(path, new)
        act("after rename" if new.name.startswith("step-") else "removing")

    replace(checkpoint, "save_file", saving)
    replace(checkpoint, "move", moving)


def die_at(point: str, times: int = 1) -> None:
    """Send SIGKILL to this process when the checkpoint reaches `point` for the `times`-th time."""
    seen = 0

    def act(name: str) -> None:
        nonlocal seen
        seen += name == point
        if seen == times and name == point:
            os.kill(os.getpid(), signal.SIGKILL)

    at_points_of_a_save(act)


def die_in_update(step: int) -> None:
    """Send SIGKILL to this process in the middle of an update, after the first parameters have changed."""
    from lapcli.training.optimizers import Optimizers

    before = Optimizers.step
    done = 0

    def update(self) -> None:
        nonlocal done
        done += 1
        if done == step:
            next(iter(self._optimizers.values())).step()
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
