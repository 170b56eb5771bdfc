"""`train.deterministic`: a run on CUDA that ends at the same bits when it is trained again, or resumed.

Where results are bitwise the same, on one machine with the same versions of everything:

    CPU                             always, for the same number of processes and threads
    CUDA                            with train.deterministic, for the same GPUs and number of processes
    another number of processes     the same state and the same global batches; the last bits differ

By default CUDA's attention backward, its embeddings under Inductor and the choice of kernels by timing change the last
bits from one run to the next. The deterministic algorithms are slower.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from lapcli.runtime.errors import LapError

CUBLAS, INDUCTOR = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"
_WORKSPACES = (":4096:8", ":16:8")  # with any other setting cuBLAS may sum in any order


def prepare_determinism() -> None:
    """Set the variables that cuBLAS and Inductor read once, for this process and its children; before CUDA starts."""
    is_late = os.environ.get(CUBLAS) not in _WORKSPACES
    if is_late and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        raise LapError(
            f"train.deterministic needs {CUBLAS}={_WORKSPACES[0]} before CUDA starts, and CUDA has started in this "
            "process; set it in the environment, or train in a new process"
        )
    if is_late:
        os.environ[CUBLAS] = _WORKSPACES[0]
    os.environ[INDUCTOR] = "1"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Context with deterministic algorithms if `wanted`; an operation without one fails. The exit restores settings.

    Not `warn_only`: with it flash attention stays nondeterministic. Uninitialized memory is not filled: a run that read
    it would be wrong whatever it held.
    """
    if not wanted:
        yield
        return
    import torch

    cudnn, memory = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    before = memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)  # Inductor's setting too
        memory.fill_uninitialized_memory = False
        cudnn.deterministic, cudnn.benchmark = True, False
        yield
    finally:
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
        memory.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark = before
