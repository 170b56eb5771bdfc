"""`train.deterministic`: a run on CUDA that ends at the same bits when it is trained again, or resumed.

What is bitwise where, on the same machine with the same versions of everything:

    CPU                             always, for the same number of processes and threads
    CUDA                            with train.deterministic, for the same GPUs and number of processes
    another number of processes     the same state and the same global batches; the last bits differ

By default CUDA's backward of attention, its embeddings under Inductor and the choice of kernels by timing differ in the
last bits from one run to the next. Deterministic ones are slower.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from lapcli.runtime.errors import LapError

CUBLAS, INDUCTOR = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"
_WORKSPACES = (":4096:8", ":16:8")  # with others cuBLAS may add up in any order


def prepare_determinism() -> None:
    """Sets what cuBLAS and Inductor read once, for this process and those that it starts: before CUDA starts here."""
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
    """Inside, deterministic algorithms or an error, if `wanted`; afterwards the settings are what they were.

    Not `warn_only`: with it flash attention stays as it is. Memory that nobody has written is not filled: a run that
    read it would be wrong with any content.
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
