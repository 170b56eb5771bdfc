"""Searches over the tiny recipe, in a process that forks its trials: an import of torch for each would take seconds."""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import HANG, _end_with_the_tests, process, wait_until
from sweep_support import write_recipe

from lapcli.experiments.runner import Runner
from lapcli.experiments.search import Search, Settings, read_space
from lapcli.runtime.errors import LapError
from lapcli.runtime.signals import end_with_parent

_numbers = itertools.count()
PER_LAYER = {"model.laplacian_heads": [{"per_layer": [0, 4]}]}
QUICK = {"train": {"steps": 12}, "validation": {"every": 4, "prompts": []}, "checkpoint": {"every": 4}}


class ForkedTrial:
    """`lap ARGUMENTS` in a fork of this process, which has imported torch but not used it."""

    def __init__(self, arguments: Sequence[str], log: Any, lock: Any, environment: Any) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            os.setpgid(0, 0)
            end_with_parent(parent, signal.SIGTERM)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
            sys.argv = ["lap", *arguments]
            code = 1
            try:
                from lapcli.cli import main

                main()
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.02)
        return code


def quick_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    return write_recipe(folder, **{**QUICK, **sections})


def settings_of(recipe: Path, over: Any = None, options: Sequence[str] = (), **given: Any) -> Settings:
    space = read_space(recipe, PER_LAYER if over is None else over, options)
    return Settings(**{"name": "s", "space": space, "metric": "validation_loss", "trials": 3, **given})


def search_of(recipe: Path, runs: Path, **given: Any) -> Search:
    return Search(settings_of(recipe, **given), runs)


class SearchProcess:
    """A search in a separate process; `log` is its output."""

    def __init__(self, recipe: Path, runs: Path, cache: Path, settings: dict[str, Any]) -> None:
        runs.mkdir(exist_ok=True)
        self.log = runs / f"search-{next(_numbers)}.txt"
        self.child: BaseProcess = process(_search, str(recipe), str(runs), str(cache), settings, str(self.log))
        self.child.start()

    def wait_for(self, what: Any) -> None:
        def holds() -> bool:
            done = what()
            assert done or self.child.is_alive(), self.log.read_text()
            return bool(done)

        wait_until(holds, self.log.read_text)

    def send(self, kind: signal.Signals) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, kind)

    def code(self) -> int:
        self.child.join(HANG)
        assert self.child.exitcode is not None, "it hangs"
        return self.child.exitcode

    @property
    def told(self) -> str:
        return self.log.read_text()


def start_search(recipe: Path, runs: Path, cache: Path, **settings: Any) -> SearchProcess:
    return SearchProcess(recipe, runs, cache, settings)


def _search(recipe: str, runs: str, cache: str, settings: dict[str, Any], log: str) -> None:
    _end_with_the_tests()
    os.environ["LAP_CACHE"] = cache
    with Path(log).open("w", buffering=1) as told:
        search = search_of(Path(recipe), Path(runs), **settings)
        try:
            Runner(search, Path(runs), tell=lambda text: print(text, file=told), start=ForkedTrial).run()
        except LapError as error:
            print(error, file=told)
            sys.exit(int(error.exit_code))


def infos(runs: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(runs.glob("*/run.json"))}


def trained_steps(run: Path) -> list[int]:
    if not (run / "metrics.jsonl").is_file():
        return []
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    return [line["step"] for line in lines if "loss" in line]
