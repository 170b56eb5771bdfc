"""What all tests share: a cache of their own, no network, real data where there is some, and one small run."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: threads that wait actively starve each other when the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).parent.parent

# In CI the same examples every time: a red run can be repeated, and a new find belongs to somebody's own machine.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
_with_real_data: set[str] = set()


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory) -> Path:
    """One cache for the tests that train, so that the built-in text is prepared once."""
    return tmp_path_factory.mktemp("shared-cache")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, shared_cache):
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("LAP_RUNS", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def test_data(request) -> Path:
    """The folder of real benchmark files; a test that needs them skips where there is none."""
    given = os.environ.get("LAP_TEST_DATA")
    if not given:
        pytest.skip("LAP_TEST_DATA names no folder of real benchmark files")
    _with_real_data.add(request.node.nodeid)
    return Path(given)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"tests on real benchmark files that ran: {len(_with_real_data)}")
    reasons = [str(skipped.longrepr[2]) for skipped in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"not run ({reasons.count(reason)}): {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory, shared_cache):
    """The quickstart recipe cut to a few steps and trained by the command, once for all tests that look at a run."""
    from support import lap

    runs = tmp_path_factory.mktemp("quickstart-runs")
    cut = ["--set", "train.steps=40", "--set", "validation.every=20", "--set", "checkpoint.every=20"]
    result = lap("train", "recipes/quickstart.yaml", *cut, "--runs-dir", str(runs), cache=shared_cache)
    assert result.returncode == 0, result.stderr
    return runs / "quickstart", result


@pytest.fixture(scope="session")
def chat_runs(quickstart, shared_cache):
    """The folder of runs with both stages of the chat quickstart, cut short too, and what the command said."""
    from support import CHAT_CUT, lap

    run, _ = quickstart
    result = lap("sft", "recipes/chat_quickstart.yaml", *CHAT_CUT, "--runs-dir", str(run.parent), cache=shared_cache)
    assert result.returncode == 0, result.stderr
    return run.parent, result
