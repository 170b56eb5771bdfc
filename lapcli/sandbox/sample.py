"""What is run, and what is said about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A program that a model wrote, and the tests that it does not see.

    The tests are executed after the prompt, whose helpers they may use, and define `check(candidate)`.
    """

    prompt: str  # the data set's: imports, helpers, the function's head
    program: str  # all of the model's program, ready to execute
    test: str
    entry_point: str  # name of the function


@dataclass(frozen=True)
class Verdict:
    passed: bool
    reason: str  # "passed", "wrong answer", "timeout", "memory", "error: ..."
    seconds: float  # from start to verdict


@dataclass(frozen=True)
class Limits:
    """For each of the two processes. Time is limited by what the program computes, so that a busy machine fails nobody;
    the limit by the clock is for programs that wait."""

    cpu_seconds: int = 5
    wall_seconds: float = 20.0
    memory: int = 512 << 20  # bytes of address space
