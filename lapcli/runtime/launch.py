"""Hands a command to torchrun on the GPUs there are; inside torchrun, or with one device, it runs in this process.

8 GPUs here                 one process for each, on a free port of this machine
--nproc 2                   two processes (gloo on the CPU)
--nnodes 4 --node-rank 1 --rdzv head:29500      the same command on each of four machines
--max-restarts 3            a dead rank ends the others, and all start again from the last checkpoint
"""

import logging
import os
import signal
import sys
import uuid
from dataclasses import dataclass

from lapcli.runtime.errors import ExitCode, UsageError
from lapcli.runtime.machine import usable_cores

# A save of the largest model takes longer than torchrun's 30 seconds between SIGTERM and SIGKILL.
SECONDS_TO_SAVE = 600


@dataclass(frozen=True)
class Processes:
    """How many, and on how many machines."""

    nproc: str = "auto"  # on this machine: a number, or one for each GPU
    nnodes: int = 1
    node_rank: int | None = None
    rdzv: str | None = None  # HOST:PORT at which the machines meet
    max_restarts: int = 0

    def here(self, device: str = "auto") -> int:
        """Processes on this machine."""
        if self.nproc == "auto":
            import torch

            gpus = torch.cuda.device_count() if device in {"auto", "cuda"} else 0
            return max(1, gpus)
        if not self.nproc.isdecimal() or not 1 <= int(self.nproc) <= 1024:
            raise UsageError(f"--nproc takes a number of processes or auto, got {self.nproc[:40]!r}")
        return int(self.nproc)

    def check(self) -> None:
        if self.nnodes < 1 or self.max_restarts < 0:
            raise UsageError("--nnodes takes at least 1, --max-restarts at least 0")
        if self.nnodes > 1 and self.rdzv is None:
            raise UsageError("--nnodes needs --rdzv HOST:PORT, the same on every machine")
        if self.rdzv is not None:
            host, _, port = self.rdzv.rpartition(":")
            if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
                raise UsageError(f"--rdzv takes HOST:PORT, got {self.rdzv[:80]!r}")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UsageError(f"--node-rank goes from 0 to {self.nnodes - 1}")


def needs_launch(processes: Processes, device: str = "auto") -> bool:
    """Whether to call `launch`; never a second time inside torchrun."""
    processes.check()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return False
    return processes.nnodes > 1 or processes.here(device) > 1


def launch(processes: Processes, arguments: list[str], device: str = "auto") -> int:
    """Runs `lap ARGUMENTS` under torchrun and returns the exit code of the whole."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    # The workers say themselves what went wrong, in one sentence; the agent's own report would bury it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Without a number torchrun gives each process one thread. A sweep gives a cell as many as it has cores, for all of
    # its processes together.
    if os.environ.get("OMP_NUM_THREADS") in (None, os.environ.get("LAP_CORES")):
        os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // processes.here(device)))
    try:
        # Our own arguments come after: torchrun's parser would take `--nproc` for one of its options.
        config, command, first = config_from_args(parse_args([*_torchrun_options(processes, device), "-m", "lapcli"]))
        elastic_launch(config, command)(*first, *arguments)
    except SignalException:
        return ExitCode.INTERRUPTED
    except ChildFailedError as error:
        return _explain(error)
    return ExitCode.DONE


def _torchrun_options(processes: Processes, device: str) -> list[str]:
    options = [
        f"--nproc-per-node={processes.here(device)}",
        f"--max-restarts={processes.max_restarts}",
        f"--shutdown-timeout={SECONDS_TO_SAVE}",
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    ]
    if processes.nnodes == 1 and processes.rdzv is None:
        return [*options, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    host, _, port = (processes.rdzv or "").rpartition(":")
    options.append(f"--nnodes={processes.nnodes}")
    if processes.node_rank is None:  # the machines number themselves
        return [*options, "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}", "--rdzv-id=lap"]
    return [*options, f"--node-rank={processes.node_rank}", f"--master-addr={host}", f"--master-port={port}"]


def _explain(error: object) -> int:
    """The exit code of the rank that failed first; a killed one is named, since it could not speak for itself."""
    rank, failure = error.get_first_failure()  # type: ignore[attr-defined]
    code = int(failure.exitcode)
    if code < 0:
        name = signal.Signals(-code).name
        print(f"lap: rank {rank} was ended by {name}; run the same command to go on", file=sys.stderr)
    return code if code in {ExitCode.USAGE, ExitCode.INTERRUPTED} else ExitCode.FAILED
