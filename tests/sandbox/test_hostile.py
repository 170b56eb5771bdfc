"""Hostile programs neither escape nor forge a pass nor stop the evaluation, in any sandbox."""

import ctypes
import os
import sys

import pytest
from hostile_programs import ATTACKS, Canaries, run_out

from lapcli.sandbox import Candidate, Mode, run_all, run_candidate

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandboxes are Linux'"),
]
PR_SET_CHILD_SUBREAPER = 36
IDS = [attack.name for attack in ATTACKS]
HONEST = Candidate("", "def f(): return 1", "def check(candidate):\n    assert candidate() == 1\n", "f")


@pytest.fixture
def canaries(tmp_path, monkeypatch):
    placed = Canaries(tmp_path)
    monkeypatch.setenv("LAP_CANARY", placed.token)
    yield placed
    placed.close()


@pytest.fixture
def heir():
    """Orphaned processes become our children, alive or not, instead of init's."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> set[int]:
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/children") as file:
            found |= {int(word) for word in file.read().split()}
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=IDS)
def test_hostile_programs_do_no_harm(attack, mode, canaries, heir):
    before = children()
    verdict = run_candidate(canaries.candidate(attack), mode, attack.limits)
    run_out(attack)
    print(f"{mode}: {attack.name}: {verdict.reason}")
    assert not verdict.passed
    assert canaries.harm() == []
    assert children() == before
    if attack.reason is not None:
        assert verdict.reason.startswith(attack.reason)


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.control], ids=[a.name for a in ATTACKS if a.control])
def test_the_attack_is_real(attack, canaries):
    """Without a sandbox the attack succeeds, so only the sandbox stops it above."""
    verdict = run_candidate(canaries.candidate(attack), Mode.UNSAFE, attack.limits)
    run_out(attack)
    assert verdict.passed or canaries.harm()


def test_the_evaluation_continues(mode, canaries):
    """Honest programs between hostile ones get their verdicts, in order."""
    some = [attack for attack in ATTACKS if attack.reason not in {"timeout", "memory"}][::6]
    mixed = [program for attack in some for program in (canaries.candidate(attack), HONEST)]
    verdicts = list(run_all(mixed, mode, workers=2))
    assert [verdict.passed for verdict in verdicts] == [False, True] * len(some)
    assert canaries.harm() == []
