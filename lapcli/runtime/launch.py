"""Runs a command under torchrun on all GPUs of the machine; inside torchrun, or with one device, in this process.

8 GPUs here                 one process for each, on a free port of this machine
--nproc 2                   two processes (gloo on the CPU)
--nnodes 4 --node-rank 1 --rdzv head:29500      the same command on each of four machines
--max-restarts 3            a dead rank ends the others, and all start again from the last checkpoint

Machines meet through torch's c10d rendezvous, whose store is in the launcher of the head node, number 0. The ranks of
every attempt have a store of their own, in the process of rank 0: the launchers of several machines may count restarts
differently, and in one lasting store, whose keys hold that count, ranks would wait for those of another attempt.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lapcli.runtime.devices import NO_AMX
from lapcli.runtime.environment import LAUNCHER, inside_torchrun
from lapcli.runtime.errors import STOPPED, ExitCode, LapError, UsageError
from lapcli.runtime.machine import usable_cores
from lapcli.runtime.signals import SecondRequest, handled

# A save of the largest model takes longer than torchrun's 30 seconds between SIGTERM and SIGKILL.
SECONDS_TO_SAVE = 600
# A batch system starts the machines of a job minutes apart.
SECONDS_TO_MEET = 600
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


@dataclass(frozen=True)
class Processes:
    """How many processes, on how many machines."""

    nproc: str = "auto"  # on this machine: a number, or one for each GPU
    nnodes: int = 1
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

    def check_gpus(self, gpus: int) -> None:
        """Refuse more processes than GPUs, since each needs its own; without a GPU any number will do."""
        if self.nproc != "auto" and 0 < gpus < self.here():
            raise UsageError(
                f"--nproc {self.nproc} needs as many GPUs, but this machine has {gpus} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); use --nproc {gpus}, or "
                "--set train.device=cpu"
            )

    def check(self) -> None:
        if self.nnodes < 1 or self.max_restarts < 0:
            raise UsageError("--nnodes must be at least 1 and --max-restarts at least 0")
        if self.nnodes > 1 and self.rdzv is None:
            raise UsageError("--nnodes needs --rdzv HOST:PORT, the same on every machine")
        if self.rdzv is not None:
            host, _, port = self.rdzv.rpartition(":")
            if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
                raise UsageError(f"--rdzv takes HOST:PORT, got {self.rdzv[:80]!r}")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"--node-rank must be from 0 to {self.nnodes - 1}")


def needs_launch(processes: Processes, device: str = "auto") -> bool:
    """Return whether the command has to go through `launch`; never inside torchrun, where it already has."""
    processes.check()
    if inside_torchrun():
        return False
    processes.check_gpus(_gpus(device))
    return processes.nnodes > 1 or processes.here(device) > 1


def launch(processes: Processes, arguments: list[str], device: str = "auto") -> int:
    """Run `lap ARGUMENTS` under torchrun and return the exit code of the command."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # The ranks report their error in one sentence; the agent's own report would bury it.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):  # it has its own level
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with _environment(processes, device), _signals_passed_on():
            # Our own arguments come after: torchrun's parser would take `--nproc` for one of its options.
            options = [*_torchrun_options(processes, device), "-m", "lapcli"]
            config, command, first = config_from_args(parse_args(options))
            elastic_launch(config, command)(*first, *arguments)
    except SignalException:
        return ExitCode.INTERRUPTED
    except ChildFailedError as error:
        return _explain(error.failures)
    except RendezvousError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise LapError(
            f"the machines cannot connect at {processes.rdzv} ({reason}); start the same command on all of them, with "
            "--node-rank 0 on the one that --rdzv names, and read the messages of the others"
        ) from error
    return ExitCode.DONE


def _gpus(device: str) -> int:
    if device not in {"auto", "cuda"}:
        return 0
    import torch

    return torch.cuda.device_count()


@contextmanager
def _environment(processes: Processes, device: str) -> Iterator[None]:
    """Set the environment that the ranks inherit, and restore it afterwards."""
    before = dict(os.environ)
    # Without a number torchrun gives each process one thread. A sweep gives a cell as many as it has cores, for all of
    # its processes together.
    if os.environ.get("OMP_NUM_THREADS") in (None, os.environ.get("LAP_CORES")):
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes.here(device)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a store for every attempt, see above
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Let torchrun pass the first signal on and wait until the ranks have saved; a second signal ends it at once.

    torchrun's own handlers would start the wait again at a second signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    second_request, is_ending = SecondRequest(), False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        if second_request.is_second(number):
            _end_at_once()
        # A copy of the first signal is ignored: another exception would interrupt torchrun's wait for the ranks.
        if not is_ending:
            is_ending = True
            name = signal.Signals(number)
            raise SignalException(f"{name.name} to the launcher", sigval=name)

    # Signals that `nohup` or a shell has set to be ignored stay ignored.
    with handled([number for number in FORWARDED_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN], handle):
        yield


def _end_at_once() -> None:
    """End this process without waiting for the ranks, and kill those: outside Linux they would outlive it."""
    try:
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    except OSError:  # no ps
        listed = ""
    for row in listed.splitlines():
        pid, parent = map(int, row.split())
        if parent == os.getpid():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # every rank leads a session, which its data workers belong to
    print(STOPPED, file=sys.stderr, flush=True)
    os._exit(ExitCode.STOPPED)


def _torchrun_options(processes: Processes, device: str) -> list[str]:
    options = [
        f"--nproc-per-node={processes.here(device)}",
        f"--max-restarts={processes.max_restarts}",
        f"--shutdown-timeout={SECONDS_TO_SAVE}",
        "--signals-to-handle=SIGUSR2",  # the others are handled here
        "--rdzv-backend=c10d",
    ]
    if processes.nnodes == 1 and processes.rdzv is None:  # port 0: a free one, so that launches do not collide
        return [*options, "--rdzv-endpoint=localhost:0", "--local-addr=localhost", f"--rdzv-id={uuid.uuid4()}"]
    # The machines cannot agree on a random id, so it is a constant; the endpoint tells jobs apart.
    options += [f"--nnodes={processes.nnodes}", f"--rdzv-endpoint={processes.rdzv}", "--rdzv-id=lap"]
    settings = f"read_timeout={SECONDS_TO_MEET}"
    if processes.node_rank is None:  # the machines number themselves, and find out who is the host by their names
        return [*options, f"--rdzv-conf={settings}"]
    # Explicitly: c10d would compare the endpoint with this machine's names, which misses secondary addresses, and
    # then no machine opens the store.
    is_host = processes.node_rank == 0
    return [*options, f"--rdzv-conf={settings},is_host={int(is_host)}", *_own_address(processes.rdzv or "", is_host)]


def _own_address(rdzv: str, is_host: bool) -> list[str]:
    """Return the option with this machine's address as the others reach it; its host name may not resolve there."""
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


def _explain(failures: Mapping[int, Any]) -> int:
    """Return the exit code for the rank that failed first; name a rank that was killed, which could not report it."""
    # A rank that only lost its connection to the failed one prints nothing, so that the reason is the last line.
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != ExitCode.LOST_PEER}
    rank, failure = min((causes or failures).items(), key=lambda item: item[1].timestamp)
    code = int(failure.exitcode)
    if not causes:
        print(
            "lap: the ranks lost the connection to each other; read the messages on the other machines, then run the "
            "same command to resume",
            file=sys.stderr,
        )
    if code < 0:
        name = signal.Signals(-code).name
        next_step = NO_AMX if code == -signal.SIGILL else "run the same command to resume"
        print(f"lap: rank {rank} was ended by {name}; {next_step}", file=sys.stderr)
    # A signal's negative code, and LOST_PEER, are no exit codes of the command.
    return code if code in {ExitCode.USAGE, ExitCode.INTERRUPTED} else ExitCode.FAILED
