"""The tests' process: executes the prompt and the tests, calls the candidate over the channel, and gives the verdict.

The only foreign code here is the data set's. Values from the candidate are checked and built anew; anything that is not
exactly an answer to the call fails the sample at once, so that no `except` of a test can swallow it.
"""

from __future__ import annotations

import json
import os
import sys

from .messages import Channel, Closed, pack, unpack

TYPE_CHECKING = False  # importing `typing` would cost as much as starting Python does
if TYPE_CHECKING:
    from typing import Any, NoReturn

# Raised for the tests as the candidate raised them. Left out is what controls a loop of the caller:
# StopIteration would end a `map` over the tests early.
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, IndexError, KeyError,
                 LookupError, MemoryError, ModuleNotFoundError, NameError, NotImplementedError, OSError, OverflowError,
                 RecursionError, RuntimeError, SyntaxError, TypeError, UnboundLocalError, ValueError, ZeroDivisionError)
}  # fmt: skip


class Raised(RuntimeError):
    """The candidate raised something of another class."""


class _Tester:
    def __init__(self, channel: Channel, verdict: int) -> None:
        self._channel = channel
        self._verdict = verdict
        self._calls = 0

    def run(self, task: dict[str, str]) -> NoReturn:
        if self._channel.receive() != {"ready": True}:
            sys.exit("the candidate's process did not start")
        self._write({"started": True})
        try:
            self._channel.send({"program": task["program"], "entry_point": task["entry_point"]})
        except Exception as error:
            self.end(False, f"error: {type(error).__name__}: {error}")
        try:
            self._check(task)
        except AssertionError as error:
            # The candidate's own assertions are errors of the program like any others.
            is_candidates = getattr(error, "of_candidate", False)
            self.end(False, f"error: AssertionError: {error}" if is_candidates else "wrong answer")
        except MemoryError:
            self.end(False, "memory")
        except BaseException as error:
            self.end(False, f"error: {type(error).__name__}: {error}")
        self.end(True, "passed")

    def _check(self, task: dict[str, str]) -> None:
        if "random" in task["test"]:  # so that verdicts are reproducible
            import random

            random.seed(0)
        names: dict[str, Any] = {"__name__": "tests"}
        exec(compile(task["prompt"], "prompt", "exec"), names)
        names[task["entry_point"]] = self._call
        exec(compile(task["test"], "test", "exec"), names)
        names["check"](self._call)

    def _call(self, *arguments: Any, **keywords: Any) -> Any:
        self._calls += 1
        sent = {"call": self._calls, "arguments": pack(list(arguments)), "keywords": pack(keywords)}
        try:
            self._channel.send(sent)
            answer = self._channel.receive()
            if type(answer) is not dict or len(answer) != 2 or answer.get("call") != self._calls:
                self.end(False, "error: not an answer to the call")
            if "value" in answer:
                return unpack(answer["value"])
            names, text = answer["raised"]
            if type(names) is not list or not names or not all(type(name) is str for name in [*names, text]):
                self.end(False, "error: not an answer to the call")
        except Closed:
            self.end(False, "ended")
        except MemoryError:
            self.end(False, "memory")
        except Exception as error:
            self.end(False, f"error: not an answer to the call ({type(error).__name__})")
        raise _error(names, text)

    def end(self, passed: bool, reason: str) -> NoReturn:
        """Write the verdict and exit at once, so that no handler of the tests runs."""
        self._write({"passed": passed, "reason": reason[:300]})
        os._exit(0)

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._verdict, json.dumps(line).encode("ascii") + b"\n")


def _error(names: list[str], text: str) -> Exception:
    """Return the candidate's exception as the closest of its classes that this process knows."""
    known = next((_RAISED[name] for name in names if name in _RAISED), None)
    error = known(text) if known else Raised(f"{names[0]}: {text}")
    error.of_candidate = True  # type: ignore[attr-defined]
    return error


def judge(channel: Channel, verdict: int, task: dict[str, str]) -> NoReturn:
    _Tester(channel, verdict).run(task)
