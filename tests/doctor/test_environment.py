"""Each check of the environment passes on a machine that is right and says what is wrong with one that is not."""

import resource
from pathlib import Path

import pytest

from lapcli.doctor.checks import Check, Finding, Status, examine, examine_apart, fails, passes, within
from lapcli.doctor.environment import (
    Gpu,
    check_bf16,
    check_capability,
    check_compiling,
    check_cores,
    check_disk,
    check_driver,
    check_file_limit,
    check_hub,
    check_locks,
    check_shared_memory,
    environment_checks,
    this_gpu,
)
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import Lock

H100 = Gpu(8, "NVIDIA H100 80GB HBM3", (9, 0), True, ("sm_80", "sm_90"), "550.54", "12.8")
T4 = Gpu(1, "Tesla T4", (7, 5), False, ("sm_80", "sm_90"), "550.54", "12.8")


def no_compiler(device_type: str) -> None:
    raise UsageError("train.compile needs a C compiler")


def unreachable(place: tuple[str, int], seconds: float) -> None:
    raise OSError("network is down")


class Connection:
    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (lambda: check_driver(H100), "passes"),
        (lambda: check_driver(Gpu(0)), "warns"),
        (lambda: check_driver(Gpu(0, driver="470.1")), "fails"),
        (lambda: check_capability(H100), "passes"),
        (lambda: check_capability(Gpu(0)), "passes"),
        (lambda: check_capability(Gpu(1, capability=(8, 9), architectures=("sm_80", "sm_86"))), "passes"),
        (lambda: check_capability(Gpu(1, capability=(12, 0), architectures=("sm_90", "compute_90"))), "passes"),
        (lambda: check_capability(Gpu(1, capability=(12, 0), architectures=("sm_90",))), "fails"),
        (lambda: check_capability(Gpu(1, capability=(10, 3), architectures=("sm_100",))), "passes"),
        (lambda: check_capability(Gpu(1, capability=(10, 3), architectures=("sm_100f",))), "passes"),
        (lambda: check_capability(Gpu(1, capability=(10, 3), architectures=("sm_100a", "compute_90a"))), "fails"),
        (lambda: check_capability(Gpu(1, capability=(9, 0), architectures=("sm_90a",))), "passes"),
        (lambda: check_capability(T4), "fails"),
        (lambda: check_bf16(H100), "passes"),
        (lambda: check_bf16(T4), "warns"),
        (lambda: check_compiling("cuda", lambda device: None), "passes"),
        (lambda: check_compiling("cuda", no_compiler), "fails"),
        (lambda: check_compiling("cpu", no_compiler), "warns"),
        (lambda: check_shared_memory(None, 8), "passes"),
        (lambda: check_shared_memory(64 * 2**20, 8), "fails"),
        (lambda: check_shared_memory(64 * 2**20, 1), "warns"),
        (lambda: check_shared_memory(2**33, 8), "passes"),
        (lambda: check_cores(64, 64, 8), "passes"),
        (lambda: check_cores(8, 64, 8), "warns"),
        (lambda: check_file_limit(100), "fails"),
        (lambda: check_file_limit(1024), "warns"),
        (lambda: check_file_limit(resource.RLIM_INFINITY), "passes"),
        (lambda: check_disk(Path("/"), lambda place: 10**8), "fails"),
        (lambda: check_disk(Path("/"), lambda place: 10**10), "warns"),
        (lambda: check_disk(Path("/"), lambda place: 10**12), "passes"),
        (lambda: check_hub(True, "https://example.org", unreachable), "passes"),
        (lambda: check_hub(False, "https://example.org", unreachable), "warns"),
        (lambda: check_hub(False, "https://example.org", lambda *_: Connection()), "passes"),
    ],
)
def test_each_check(finding, status):
    found: Finding = finding()
    assert found.status == status, found
    assert bool(found.next_step) is (status != "passes")


def test_locks(tmp_path):
    """A folder that is not there yet is checked by the one above it, and nothing is left in either."""
    assert check_locks("LAP_RUNS", tmp_path / "not" / "there").status == "passes"
    assert check_locks("LAP_RUNS", tmp_path, lambda file: Lock.HELD).status == "fails"
    assert check_locks("LAP_RUNS", tmp_path, lambda file: Lock.UNSUPPORTED).status == "warns"
    assert not list(tmp_path.iterdir())
    found = check_locks("LAP_RUNS", Path("/proc"))
    assert found.status == "fails"
    assert "/proc cannot be written" in found.text


def test_this_machine():
    results = list(examine(environment_checks(this_gpu(), 2)))
    assert len({result.name for result in results}) == len(results) == 11
    assert not [result for result in results if result.finding.status is Status.FAILS]


def broken() -> Finding:
    raise ValueError("first line\nsecond line")


def test_a_check_that_breaks_off_has_failed_and_the_others_run():
    checks = [Check("a", "broken", broken), Check("a", "fine", lambda: passes("fine")), Check("a", "x", broken, False)]
    first, second, third = examine(checks)
    assert (first.finding.status, second.finding.status, third.finding.status) == ("fails", "passes", "warns")
    assert first.finding.text == "ValueError: first line"
    assert "next: report it" in first.to_text()


def test_what_is_not_a_number_is_not_within_a_limit():
    assert within(1e-3, 1e-2, "x", "y").status == "passes"
    assert within(1e-1, 1e-2, "x", "y").status == "fails"
    assert within(float("nan"), 1e-2, "x", "y").status == "fails"


def kill_process() -> Finding:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGILL)
    return fails("it goes on", "never")


def four_checks() -> list[Check]:
    return [
        Check("a", "one", _fine),
        Check("a", "two", kill_process),
        Check("a", "three", kill_process, is_needed=False),
        Check("a", "four", _fine),
    ]


def _fine() -> Finding:
    return passes("fine")


@pytest.mark.slow
def test_a_check_that_ends_its_process_has_failed_and_the_others_run():
    results = list(examine_apart(four_checks))
    assert [result.name for result in results] == ["one", "two", "three", "four"]
    assert [str(result.finding.status) for result in results] == ["passes", "fails", "warns", "passes"]
    assert "SIGILL" in results[1].finding.text
