"""Keeps torch from importing its compiler where nothing is compiled: that takes as long as all the rest of a plan."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Inside, functions that the compiler must not enter no longer import it (2 seconds) in order to tell it so.

    Whatever else is asked of the compiler is answered by the real one. Afterwards everything is as it was.
    """
    if NAME in sys.modules:
        yield
        return
    stand_in = _StandIn()
    sys.modules[NAME] = stand_in
    try:
        yield
    finally:
        stand_in.leave()


class _StandIn(ModuleType):
    def __init__(self) -> None:
        super().__init__(NAME)
        self._told: list[Any] = []

    def disable(self, function: Callable, recursive: bool = True, wrapping: bool = True) -> Callable:
        self._told.append(function)
        return function

    def leave(self) -> None:
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        for function in self._told:  # they remember what they were answered; let them ask the real one next time
            vars(function).pop("__dynamo_disable", None)
        self._told.clear()

    def __getattr__(self, name: str) -> Any:
        self.leave()
        return getattr(importlib.import_module(NAME), name)
