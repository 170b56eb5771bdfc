"""Correct programs pass, wrong programs fail, and the reason says why; on problems written here."""

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest
from support import run_process, start_process, wait_until

from lapcli.runtime.errors import UsageError
from lapcli.sandbox import Candidate, Limits, Mode, choose_mode, run_all, run_candidate
from lapcli.sandbox import run as run_module

SHORT = Limits(cpu_seconds=1, wall_seconds=2.0)

PROMPT = '''from typing import List

def shifted(xs: List[int]) -> List[int]:
    return [x + 1 for x in xs]

def unshifted(xs: List[int]) -> List[int]:
    """The opposite of shifted."""
'''
TEST = """
METADATA = {}

def check(candidate):
    for n in range(20):
        assert candidate(shifted(list(range(n)))) == list(range(n))
    assert unshifted(xs=[5]) == [4]
"""


def unshifted(body: str, test: str = TEST) -> Candidate:
    return Candidate(PROMPT, PROMPT + f"    {body}\n", test, "unshifted")


def returning(expression: str, test: str) -> Candidate:
    """A program whose function `f` returns an expression of `x`."""
    return Candidate("", f"def f(x=None):\n    return {expression}\n", f"def check(candidate):\n    {test}\n", "f")


def test_reasons(mode):
    """One line per kind of program, all at once."""
    programs = [
        ("passed", unshifted("return [x - 1 for x in xs]")),
        ("wrong answer", unshifted("return xs")),
        ("wrong answer", unshifted("return None")),
        ("error: ZeroDivisionError: division by zero", unshifted("return 1 / 0")),
        ("error: AssertionError: no", unshifted("assert xs is None, 'no'")),
        ("error: NameError: the program defines no unshifted", Candidate(PROMPT, "x = 1", TEST, "unshifted")),
        ("error: SyntaxError: '(' was never closed (candidate, line 8)", unshifted("return (")),
        ("error: RecursionError: maximum recursion depth exceeded", unshifted("return unshifted(xs)")),
        ("memory", unshifted("return bytearray(2 << 30)")),
        ("timeout", unshifted("while True: pass")),
        ("timeout", unshifted("import time; time.sleep(100)")),
        ("error: the program ended before it answered", unshifted("import os; os._exit(0)")),
        ("error: Raised: SystemExit: 0", unshifted("raise SystemExit(0)")),
        ("error: KeyError: 'check'", unshifted("return [x - 1 for x in xs]", test="x = 1")),
        ("passed", unshifted("print('x' * 10**6); return [x - 1 for x in xs]")),
        ("passed", returning("sorted(x)", "assert candidate({3, 1}) == [1, 3]")),
    ]
    # Short limits only for programs that reach them: the others get enough time on a busy machine.
    endless = [program for reason, program in programs if reason == "timeout"]
    ending = [program for reason, program in programs if reason != "timeout"]
    found = {False: run_all(ending, mode, workers=2), True: run_all(endless, mode, workers=2, limits=SHORT)}
    verdicts = [next(found[reason == "timeout"]) for reason, _ in programs]
    print(f"mode: {mode}")
    assert [verdict.reason for verdict in verdicts] == [reason for reason, _ in programs]
    assert [verdict.passed for verdict in verdicts] == [reason == "passed" for reason, _ in programs]
    assert all(verdict.seconds > 0 for verdict in verdicts)


LIBRARY = """
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
Point = namedtuple("Point", "x y")
class Empty:
    def __len__(self): return 0
class Late(ValueError): pass
"""
# An expression of a program, a check of its value that holds, and one that fails.
OF_THE_LIBRARY = [
    ("Decimal('0.1') + Decimal('0.2')", "got == Decimal('0.3') and got > 0", "got == 0.3"),
    ("Decimal('0')", "not got", "got"),
    ("Fraction(1, 3)", "got == Fraction(2, 6) and abs(got - 1 / 3) < 1e-9", "got == Fraction(1, 2)"),
    ("deque([1, 2], 2)", "got == deque([1, 2]) and list(got) == [1, 2] and got.maxlen == 2", "got == [1, 2]"),
    ("Counter('aab')", "got == {'a': 2, 'b': 1} and got['z'] == 0", "got == Counter('ab')"),
    ("Counter('aab').most_common(1)", "got == [('a', 2)]", "got == [['a', 2]]"),
    ("defaultdict(list, a=[1])", "got == {'a': [1]} and got['b'] == []", "got == {}"),
    ("{'a': 1}.keys()", "got == {'a'} and 'a' in got and sorted(got) == ['a']", "got == ['a']"),
    ("range(2, 8, 3)", "got == range(2, 6, 3) and list(got) == [2, 5]", "got == [2, 5]"),
    ("Point(1, 2)", "got == (1, 2) and got.x == 1 and got._asdict() == {'x': 1, 'y': 2}", "got == [1, 2]"),
    ("date(2024, 2, 29)", "got == date(2024, 2, 29) and got.year == 2024", "got == '2024-02-29'"),
    ("datetime(2024, 2, 29, 1, tzinfo=timezone.utc)", "got.tzinfo is not None", "got == datetime(2024, 2, 29, 1)"),
    ("date(2024, 3, 1) - date(2024, 2, 28)", "got == timedelta(2) and got.days == 2", "got == 2"),
    ("(-1) ** 0.5", "abs(got - 1j) < 1e-9", "got == 1"),
    ("Empty()", "not got", "got"),
    ("Empty", "bool(got)", "got == 0"),
]


def test_standard_library_values_are_judged_as_in_one_process(mode):
    """A check has the same result locally and over the channel."""
    cases = [(number, holds, fails) for number, (_, holds, fails) in enumerate(OF_THE_LIBRARY)]
    values = ", ".join(f"lambda: {expression}" for expression, _, _ in OF_THE_LIBRARY)
    program = f"{LIBRARY}\nVALUES = [{values}]\ndef f(n):\n    return VALUES[n]()\n"
    test = f"""
def check(candidate):
    for number, holds, fails in {cases!r}:
        assert eval(holds, globals(), {{"got": candidate(number)}}), holds
        assert not eval(fails, globals(), {{"got": candidate(number)}}), fails
"""
    here: dict = {}
    exec(program + test, here)
    here["check"](here["f"])
    assert run_candidate(Candidate(LIBRARY, program, test, "f"), mode).reason == "passed"


def test_a_failed_start_is_an_error_not_a_verdict(any_mode, monkeypatch):
    """A broken sandbox must not count as a wrong answer."""
    from lapcli.sandbox import command, run

    monkeypatch.setattr(run, "ATTEMPTS", 1)
    monkeypatch.setattr(command, "_START", "raise OSError('no such luck')")
    with pytest.raises(run.NotStarted, match="did not start: OSError: no such luck"):
        run_candidate(returning("1", "assert candidate() == 1"), any_mode)
    monkeypatch.setattr(command, "executable", lambda: "/nowhere/python")
    with pytest.raises(run.NotStarted):
        run_candidate(returning("1", "assert candidate() == 1"), any_mode)


def test_nothing_outlives_an_evaluation_that_is_killed(mode, tmp_path):
    """The evaluation runs in another process; its samples keep a file open while they live."""
    code = f"""
import os
from lapcli.sandbox import Candidate, Mode, run, run_candidate

held = os.open({str(tmp_path / "held")!r}, os.O_RDWR | os.O_CREAT)
start = run.subprocess.Popen

def popen(*arguments, pass_fds=(), **more):
    return start(*arguments, pass_fds=[*pass_fds, held], **more)

run.subprocess.Popen = popen
program = "import time\\ndef f(): time.sleep(60)"
run_candidate(Candidate("", program, "def check(c): c()", "f"), Mode({mode.value!r}))
"""
    evaluation = start_process([sys.executable, "-c", code])
    held = tmp_path / "held"

    def is_up() -> bool:  # the evaluation itself and two processes
        assert evaluation.poll() is None
        return held.exists() and len(holders(held)) >= 3

    wait_until(is_up)
    time.sleep(0.5)
    evaluation.kill()
    evaluation.wait()
    wait_until(lambda: not holders(held), lambda: holders(held))


def holders(path: Path) -> list[int]:
    """Processes that have a file open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.path.realpath(link) == str(path.resolve()) for link in (process / "fd").iterdir()):
                found.append(int(process.name))
    return found


def test_the_sandbox_needs_only_the_standard_library():
    """So that it starts quickly and works without torch."""
    code = "import sys, lapcli.sandbox; print({'torch', 'numpy', 'pydantic', 'rich'} & set(sys.modules))"
    assert run_process([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


class TestChoice:
    def test_the_safest_working_sandbox_is_chosen(self, monkeypatch):
        monkeypatch.setattr(run_module, "probe", {Mode.BUBBLEWRAP: None, Mode.LANDLOCK: None}.get)
        assert choose_mode(allow_unsafe=True) is Mode.BUBBLEWRAP
        monkeypatch.setattr(run_module, "probe", {Mode.BUBBLEWRAP: "no", Mode.LANDLOCK: None}.get)
        assert choose_mode(allow_unsafe=True) is Mode.LANDLOCK

    def test_without_a_sandbox_the_refusal_names_the_next_step(self, monkeypatch):
        monkeypatch.setattr(run_module, "probe", lambda mode: "broken here")
        with pytest.raises(UsageError, match=r"apt-get install bubblewrap.*--unsafe-code-execution.*broken here"):
            choose_mode(allow_unsafe=False)

    def test_unsafe_is_loud_and_named(self, monkeypatch, capsys):
        monkeypatch.setattr(run_module, "probe", lambda mode: "broken here")
        chosen = choose_mode(allow_unsafe=True)
        assert "WITHOUT A SANDBOX" in capsys.readouterr().err
        assert "unsafe" in chosen

    def test_unsafe_still_gives_verdicts(self):
        right, wrong = unshifted("return [x - 1 for x in xs]"), unshifted("return xs")
        assert [v.reason for v in run_all([right, wrong], Mode.UNSAFE, workers=1)] == ["passed", "wrong answer"]

    def test_a_sandbox_that_does_not_hold_is_not_chosen(self, monkeypatch):
        """The probe detects a bubblewrap that isolates nothing."""
        if not sys.platform.startswith("linux"):
            pytest.skip("only on Linux is there anything to probe")
        from lapcli.sandbox import command

        monkeypatch.setattr(command, "in_bubblewrap", lambda words: words)
        monkeypatch.setattr(command, "bubblewrap", lambda: "/bin/true")
        problem = run_module.probe.__wrapped__(Mode.BUBBLEWRAP)
        assert problem is not None
        assert "does not hold" in problem
