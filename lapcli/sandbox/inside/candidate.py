"""The candidate's process: executes the program, then answers calls of its function until it is killed.

Nothing here can be trusted once the program runs, and nothing is: all that leaves this process are bytes on one socket,
which the tests' process takes for values or for a failure.
"""

from __future__ import annotations

import sys
import types

from .messages import Channel, TooLarge, pack, unpack

TYPE_CHECKING = False  # importing `typing` would cost as much as starting Python does
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


MOST_BASES = 20  # classes of an exception that are named
_OUT_OF_MEMORY: dict[str, Any] = {"raised": [["MemoryError"], ""]}


def serve(channel: Channel) -> None:
    """Receive the program and its function's name, then answer calls (number, arguments, keyword arguments)."""
    channel.send({"ready": True})
    order = channel.receive()
    problem: BaseException | None = None
    try:
        function = _load(order["program"], order["entry_point"])
    except BaseException as error:
        problem = error
    while True:
        call = channel.receive()
        answer: dict[str, Any]
        try:
            if problem is not None:
                raise problem
            answer = {"value": pack(function(*unpack(call["arguments"]), **unpack(call["keywords"])))}
        except MemoryError:  # no new answer can be built: the error's frames still hold what fills the memory
            answer = _OUT_OF_MEMORY
        except BaseException as error:
            answer = _raised(error)
        try:
            channel.send({"call": call["call"], **answer})
        except (TooLarge, ValueError, RecursionError, MemoryError) as error:
            channel.send({"call": call["call"], **_raised(error)})


def _load(program: str, entry_point: str) -> Callable[..., Any]:
    """Execute the program and return its function.

    The program is a module of its own, not `__main__`, so that its script part does not run.
    """
    if "random" in program:  # so that verdicts are reproducible
        import random

        random.seed(0)
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module  # where `dataclasses` looks for the module of a class
    exec(compile(program, "candidate", "exec"), module.__dict__)
    if entry_point not in module.__dict__:
        raise NameError(f"the program defines no {entry_point}")
    function: Callable[..., Any] = module.__dict__[entry_point]
    return function


def _raised(error: BaseException) -> dict[str, Any]:
    """Return the answer for an exception: the names of its class and its bases, because a test may expect one of
    those."""
    try:
        text = str(error)[:200]
    except BaseException:
        text = ""
    return {"raised": [[str(kind.__name__)[:100] for kind in type(error).__mro__[:MOST_BASES]], text]}
