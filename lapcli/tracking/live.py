"""Mirrors a run while it is trained: `lap track --follow` in a process of its own for each tracker.

The process only reads the run's files, so that neither a tracker that hangs nor the lock of the interpreter delays a
step. A thread of rank 0 starts it when the run exists, and warns once if it fails. When training has ended, the process
gets a few seconds to finish; `lap track` can send the rest later.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from lapcli.runs import INFO, METRICS
from lapcli.runtime.environment import LAUNCHER, is_main_process
from lapcli.runtime.files import make_folder, open_to_write, read_text
from lapcli.runtime.signals import end_with_parent
from lapcli.tracking.tracker import FOLDER, check_installed

SECONDS_TO_FINISH = 9.0  # after the training, for all processes together
_LOOK = 0.25  # seconds between two polls of the processes


@dataclass
class _MirrorProcess:
    run: Path
    tracker: str
    process: subprocess.Popen[bytes]
    log: Path


class LiveMirrors:
    """A context in which the runs at `paths` that this process trains are mirrored, by rank 0 alone.

    `warn` gets a sentence for a tracker that fails; training continues.
    """

    def __init__(self, trackers: Sequence[str], paths: Sequence[Path], warn: Callable[[str], None]) -> None:
        self._trackers = list(dict.fromkeys(trackers)) if is_main_process() else []
        self._waiting, self._warn = list(paths), warn
        self._mirrors: list[_MirrorProcess] = []
        self._stop = threading.Event()
        self._has_failed = False
        self._thread: threading.Thread | None = None
        for name in self._trackers:
            check_installed(name)

    def __enter__(self) -> Self:
        if self._trackers:
            # PDEATHSIG is sent when the thread that started a process ends, so the thread lives until they have ended.
            self._thread = threading.Thread(target=self._watch, name="trackers", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._thread is not None:
            self._has_failed = kind is not None
            self._stop.set()
            # A tracker that hangs must not keep the finished training from exiting.
            self._thread.join(SECONDS_TO_FINISH + 1)

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK):
            self._start([path for path in self._waiting if _is_trained_here(path)])
            self._say_what_failed()
        # A run that had finished before this call is mirrored too, as far as the tracker lacks it.
        is_meant = _is_trained_here if self._has_failed else _is_run
        self._start([path for path in self._waiting if is_meant(path)])
        deadline = time.monotonic() + SECONDS_TO_FINISH
        while self._mirrors and time.monotonic() < deadline:
            time.sleep(_LOOK)
            self._say_what_failed()
        for mirror in self._mirrors:
            with suppress(ProcessLookupError):
                # The group, since a tracker's library may have started processes of its own (W&B does).
                os.killpg(mirror.process.pid, signal.SIGKILL)
            mirror.process.wait()
            self._warn(
                f"{mirror.tracker} did not receive all of {mirror.run.name} in time; send the rest with lap track "
                f"{mirror.run} --to {mirror.tracker}"
            )

    def _start(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._waiting.remove(path)
            for tracker in self._trackers:
                try:
                    self._mirrors.append(_started(path, tracker))
                except OSError as error:
                    self._warn(f"{path.name} is not mirrored to {tracker} ({error.strerror or error})")

    def _say_what_failed(self) -> None:
        for mirror in list(self._mirrors):
            if (code := mirror.process.poll()) is not None:
                self._mirrors.remove(mirror)
                if code:
                    self._warn(f"{mirror.run.name} is not mirrored to {mirror.tracker}: {_reason(mirror.log, code)}")


def _started(path: Path, tracker: str) -> _MirrorProcess:
    log = path / FOLDER / f"{tracker}.log"
    make_folder(log.parent)
    # With these variables the child would take itself for a rank of the training.
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", LAUNCHER)
    with open_to_write(log) as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "lapcli", "track", str(path.resolve()), "--to", tracker, "--follow"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env={name: value for name, value in os.environ.items() if name not in ranks},
            process_group=0,  # Ctrl-C must reach only the training; the mirror ends when the run does
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )
    return _MirrorProcess(path, tracker, process, log)


def _is_run(path: Path) -> bool:
    return (path / INFO).is_file()


def _is_trained_here(path: Path) -> bool:
    """Return whether this process trains the run and has written metrics; before, an old run of that name may exist."""
    try:
        info = json.loads(read_text(path / INFO))
    except (OSError, ValueError):
        return False
    is_ours = isinstance(info, dict) and (info.get("pid"), info.get("host")) == (os.getpid(), socket.gethostname())
    return is_ours and (path / METRICS).is_file()


def _reason(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    messages = [line.removeprefix("lap: ") for line in lines if line.startswith("lap: ")]
    return (messages or lines or [f"it ended with code {code}"])[-1]
