"""Runs a command under torchrun on all GPUs of the machine; inside torchrun, or with one device, in this process.

8 GPUs here                 one process for each, on a free port of this machine
--nproc 2                   two processes (gloo on the CPU)
--nnodes 4 --node-rank 1 --rdzv head:29500      the same command on each of four machines
--max-restarts 3            a dead rank ends the others, and all start again from the last checkpoint
--nnodes 2:4                as many machines as are there: all start again when one is lost or joins

Machines meet through torch's c10d rendezvous, whose store is in the launcher of the head node, number 0. The ranks of
each attempt have a separate store, in the process of rank 0: the launchers of several machines may count restarts
differently, and in one lasting store, whose keys hold that count, ranks would wait for those of another attempt.
"""

import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lapcli.runtime.environment import ELASTIC, LAUNCHER, STOPPED_MARK, inside_torchrun, usable_cores
from lapcli.runtime.errors import STOPPED, ExitCode, Interrupted, LapError, UsageError
from lapcli.runtime.signals import stop_on_signal

# A batch system starts the machines of a job minutes apart.
SECONDS_TO_MEET = 600
#: NCCL logs the pending operation of each rank, for torch's flight recorder, before it ends a rank with SIGABRT.
_NCCL_TRACE = Path(tempfile.gettempdir()) / "lap_nccl_trace_rank_"
_AFTER_SIGNAL: dict[int, str] = {
    signal.SIGABRT: (
        "NCCL ends a rank this way if a collective takes longer than --step-timeout, or if another rank is gone; "
        f"{_NCCL_TRACE}* tell which ranks were waiting, and the same command resumes"
    ),
}


@dataclass(frozen=True)
class Processes:
    """The number of processes and machines of a launch."""

    nproc: str = "auto"  # on this machine: a number, or one for each GPU
    nnodes: str = "1"  # a number, or MIN:MAX
    node_rank: int | None = None
    rdzv: str | None = None  # HOST:PORT at which the machines meet
    max_restarts: int = 0

    def here(self, device: str = "auto") -> int:
        """Return the number of processes on this machine."""
        if self.nproc == "auto":
            return max(1, _gpus(device))
        if not self.nproc.isdecimal() or not 1 <= int(self.nproc) <= 1024:
            raise UsageError(f"--nproc takes a number of processes from 1 to 1024, or auto, got {self.nproc[:40]!r}")
        return int(self.nproc)

    @property
    def machines(self) -> range:
        """The minimum and maximum number of machines."""
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", self.nnodes)
        fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= fewest <= most:
            raise UsageError(f"--nnodes takes a number of machines or MIN:MAX, got {self.nnodes[:40]!r}")
        return range(fewest, most + 1)

    @property
    def is_elastic(self) -> bool:
        return len(self.machines) > 1

    def check(self, gpus: int = 0) -> None:
        """Refuse options that contradict each other, and more processes than `gpus`; without a GPU any number will
        do."""
        most = self.machines[-1]
        if self.max_restarts < 0:
            raise UsageError("--max-restarts must be at least 0")
        if self.is_elastic and not self.max_restarts:
            raise UsageError(f"--nnodes {self.nnodes} needs --max-restarts: a lost machine restarts the others")
        if most > 1 and self.rdzv is None:
            raise UsageError("--nnodes needs --rdzv HOST:PORT, the same on every machine")
        if self.rdzv is not None and not re.fullmatch(r".+:\d+", self.rdzv):
            raise UsageError(f"--rdzv takes HOST:PORT, got {self.rdzv[:80]!r}")
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise UsageError(f"--node-rank must be from 0 to {most - 1}")
        if self.nproc != "auto" and 0 < gpus < self.here():
            raise UsageError(
                f"--nproc {self.nproc} needs as many GPUs, but this machine has {gpus} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); use --nproc {gpus}, or "
                "--set train.device=cpu"
            )


def needs_launch(processes: Processes, device: str = "auto") -> bool:
    """Return whether the command must go through `launch`; never inside torchrun, where it already has."""
    if inside_torchrun():
        return False
    processes.check(_gpus(device))
    return processes.machines[-1] > 1 or processes.here(device) > 1


def launch(processes: Processes, arguments: list[str], device: str = "auto") -> int:
    """Run `lap ARGUMENTS` under torchrun and return the exit code of the command."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # The ranks report their error in one sentence; the agent's own report would bury it.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):  # it has its own level
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="lap-") as folder:
        mark = Path(folder) / "stopped"
        _set_environment(processes, device, mark)
        try:
            with stop_on_signal(lambda name: _pass_on(name, mark, processes.is_elastic), at_once=_end_at_once):
                # Our own arguments come after: torchrun's parser would take `--nproc` as one of its options.
                options = [*_torchrun_options(processes, device), "-m", "lapcli"]
                config, command, first = config_from_args(parse_args(options))
                elastic_launch(config, command)(*first, *arguments)
        except ChildFailedError as error:
            return _explain(error.failures, mark.exists())
        except RendezvousError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise LapError(
                f"the machines cannot connect at {processes.rdzv} ({reason}); start the same command on all of them, "
                "with --node-rank 0 on the one that --rdzv names, and read the messages of the others"
            ) from error
        return ExitCode.INTERRUPTED if mark.exists() else ExitCode.DONE


def _gpus(device: str) -> int:
    if device not in {"auto", "cuda"}:
        return 0
    import torch

    return torch.cuda.device_count()


def _set_environment(processes: Processes, device: str, mark: Path) -> None:
    """Set the environment that the ranks inherit; this process does nothing else any more."""
    # Without a number torchrun gives each process one thread. A sweep gives a cell one thread per core, for all of its
    # processes together.
    if os.environ.get("OMP_NUM_THREADS") in (None, os.environ.get("LAP_CORES")):
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes.here(device)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store for every attempt, see above
    trace = {"DUMP_ON_TIMEOUT": "1", "BUFFER_SIZE": "2000", "DUMP_TEMP_FILE": str(_NCCL_TRACE)}
    for key, value in trace.items():
        os.environ.setdefault(f"TORCH_FR_{key}", value)
    os.environ |= {LAUNCHER: str(os.getpid()), STOPPED_MARK: str(mark)}
    if processes.is_elastic:
        os.environ[ELASTIC] = "1"


def _pass_on(name: str, mark: Path, is_elastic: bool) -> None:
    """Ask the ranks to stop: they save and exit with 0, as do ranks that torchrun restarts.

    Where machines may leave, this one does once its ranks have saved; torchrun would start them again, or wait for the
    others, which continue.
    """
    mark.touch()
    ranks = _ranks()
    if not ranks:  # it waits for other machines, or for ranks to start
        raise Interrupted(f"stopped by {name}; what was saved is kept, run the same command to resume")
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    if is_elastic:
        for pid in ranks:
            with suppress(ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        shutil.rmtree(mark.parent, ignore_errors=True)
        os._exit(ExitCode.INTERRUPTED)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Kill the ranks and end this process without waiting for them: outside Linux they would outlive it."""
    for pid in _ranks():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # every rank leads a session, which its data workers belong to
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


def _ranks() -> list[int]:
    """Return this process's children as Linux lists them; elsewhere torchrun ends the ranks itself."""
    files = Path("/proc/self/task").glob("*/children")
    return [int(pid) for file in files for pid in file.read_text().split()]


def _torchrun_options(processes: Processes, device: str) -> list[str]:
    options = [
        f"--nproc-per-node={processes.here(device)}",
        f"--max-restarts={processes.max_restarts}",
        "--signals-to-handle=SIGUSR2",  # the others are handled here
        "--rdzv-backend=c10d",
    ]
    if processes.nnodes == "1" and processes.rdzv is None:  # port 0: a free one, so that launches do not collide
        return [*options, "--rdzv-endpoint=localhost:0", "--local-addr=localhost", f"--rdzv-id={uuid.uuid4()}"]
    # The machines cannot agree on a random id, so it is a constant; the endpoint distinguishes jobs.
    options += [f"--nnodes={processes.nnodes}", f"--rdzv-endpoint={processes.rdzv}", "--rdzv-id=lap"]
    settings = f"read_timeout={SECONDS_TO_MEET}"
    if processes.node_rank is None:  # the machines number themselves, and find out who is the host by their names
        return [*options, f"--rdzv-conf={settings}"]
    # Explicitly: c10d would compare the endpoint with this machine's names, which misses secondary addresses, and
    # then no machine would open the store.
    is_host = processes.node_rank == 0
    return [*options, f"--rdzv-conf={settings},is_host={int(is_host)}", *_own_address(processes.rdzv or "", is_host)]


def _own_address(rdzv: str, is_host: bool) -> list[str]:
    """Return the option with this machine's address for the other machines; its host name may not resolve there."""
    host, _, port = rdzv.rpartition(":")
    if is_host:
        return [f"--local-addr={host}"]
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as route:
            route.connect(place)  # sends nothing; chooses the interface towards the host
            return [f"--local-addr={route.getsockname()[0]}"]
    except OSError:
        return []


def _explain(failures: Mapping[int, Any], is_stopped: bool) -> int:
    """Return the exit code for the rank that failed first; name a rank that was killed, which could not report it."""
    # A rank that only lost its connection to the failed one prints nothing, so that the reason is the last line.
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != ExitCode.LOST_PEER}
    rank, failure = min((causes or failures).items(), key=lambda item: item[1].timestamp)
    code = int(failure.exitcode)
    if is_stopped and code in {-signal.SIGTERM, ExitCode.LOST_PEER}:  # before the rank could handle signals
        return ExitCode.INTERRUPTED
    if not causes:
        print(
            "lap: the ranks lost the connection to each other; read the messages on the other machines, then run the "
            "same command to resume",
            file=sys.stderr,
        )
    if code < 0:
        name = signal.Signals(-code).name
        next_step = _AFTER_SIGNAL.get(-code, "run the same command to resume")
        print(f"lap: rank {rank} was ended by {name}; {next_step}", file=sys.stderr)
    # A signal's negative code, and LOST_PEER, are not exit codes of the command.
    return code if code in {ExitCode.USAGE, ExitCode.INTERRUPTED} else ExitCode.FAILED
