"""Each environment check passes on a good machine and names the fault of a bad one."""

import errno
import os
import signal
from pathlib import Path

import pytest

from lapcli.doctor import checks as doctor
from lapcli.doctor.checks import (
    Check,
    Finding,
    Gpu,
    check_gpu,
    check_locks,
    environment_checks,
    examine,
    fails,
    passes,
    this_gpu,
)

H100 = Gpu(8, "NVIDIA H100 80GB HBM3", True, "550.54")
T4 = Gpu(1, "Tesla T4", False, "550.54")


def no_locks(file: object, how: int) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (lambda: check_gpu(H100), "passes"),
        (lambda: check_gpu(T4), "warns"),
        (lambda: check_gpu(Gpu(0)), "warns"),
        (lambda: check_gpu(Gpu(0, driver="470.1")), "fails"),
    ],
)
def test_each_check(finding, status):
    found: Finding = finding()
    assert found.status == status, found
    assert bool(found.next_step) is (status != "passes")


def test_locks(tmp_path, monkeypatch):
    """A missing folder is checked through its parent, and no files are left in either."""
    assert check_locks("LAP_RUNS", tmp_path / "not" / "there").status == "passes"
    assert check_locks("LAP_RUNS", Path("/proc")).status == "fails"
    for lock in (lambda file, how: None, no_locks):
        monkeypatch.setattr(doctor.fcntl, "flock", lock)
        assert check_locks("LAP_RUNS", tmp_path).status == "fails"
    assert not list(tmp_path.iterdir())


def test_this_machine():
    results = list(examine(environment_checks(this_gpu())))
    assert len({result.name for result in results}) == len(results)
    assert not [result for result in results if result.finding.status == "fails"]


def broken() -> Finding:
    raise ValueError("first line\nsecond line")


def kill_process() -> Finding:
    os.kill(os.getpid(), signal.SIGILL)
    return fails("it goes on", "never")


def fine() -> Finding:
    return passes("fine")


def test_a_crashing_check_counts_as_failed_and_the_others_run():
    checks = [Check("a", "broken", broken), Check("a", "ended", kill_process, may_crash=True), Check("a", "fine", fine)]
    results = list(examine(checks))
    assert [str(result.finding.status) for result in results] == ["fails", "fails", "passes"]
    assert results[0].finding.text == "ValueError: first line"
