"""Shared fixtures: a separate cache, no network, real data if available, and one small run."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported: one thread for each of the two processes that `make test` runs the tests in, and
# spinning threads starve each other on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1" if os.environ.get("PYTEST_XDIST_WORKER") else "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Some virtual machines report Intel AMX without supporting it: every bf16 matmul then crashes with an illegal
# instruction. Without it the same matmuls use AVX-512.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# xdist sets it, and commands would wrap their lines at that width.
os.environ.pop("COLUMNS", None)

ROOT = Path(__file__).parent.parent

# No test depends on the machine's load: hypothesis has no deadline for running or generating examples.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# CI uses the same examples every time, so a failure can be reproduced; new examples are searched locally.
settings.register_profile("ci", settings.get_profile("any machine"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "any machine")

# Files that use the shared trained runs, and so share a process; then what takes longest.
SHARED_RUNS = {
    "tests/test_cli.py",
    "tests/test_readme.py",
    "tests/commands/test_runs.py",
    "tests/commands/test_sample.py",
    "tests/commands/test_sft.py",
}
FIRST = [
    *sorted(SHARED_RUNS),
    "tests/experiments/test_search.py",
    "tests/runtime/test_launch.py",
    "tests/training/test_objectives_in_two_processes.py",
    "tests/export/test_export.py",
    "tests/training/test_host_waits.py",
    "tests/extending/test_package.py",
    "tests/experiments/test_runner.py",
]


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="skip tests that would start a process or train a run")


def pytest_configure(config):
    import support

    support.quick = config.getoption("--quick")


def pytest_collection_modifyitems(items):
    def place(item):
        file = item.nodeid.split("::")[0]
        return FIRST.index(file) if file in FIRST else len(FIRST)

    items.sort(key=place)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Objects left by a file (modules, compiled code) stay: the garbage collector need not scan them in later tests."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # so that the interpreter can end as it would


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The tests of a file share a process because of their fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return "shared runs" if file in SHARED_RUNS else file

    return ByFile(config, log)


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
    """The folder of real benchmark files; a test that needs them is skipped without it."""
    given = os.environ.get("LAP_TEST_DATA")
    if not given:
        pytest.skip("LAP_TEST_DATA names no folder of real benchmark files")
    request.node.user_properties.append(("real files", True))
    return Path(given)


def pytest_terminal_summary(terminalreporter):
    reports = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, []))
    count = sum(("real files", True) in report.user_properties for report in reports if report.when == "call")
    terminalreporter.write_line(f"tests on real benchmark files that ran: {count}")
    reasons = [str(skipped.longrepr[2]) for skipped in terminalreporter.stats.get("skipped", [])]
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"not run ({reasons.count(reason)}): {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory, shared_cache):
    """The quickstart recipe, cut to a few steps and trained by the command once for all tests that need a run."""
    from support import lap

    runs = tmp_path_factory.mktemp("quickstart-runs")
    cut = ["--set", "train.steps=40", "--set", "validation.every=20", "--set", "checkpoint.every=20"]
    result = lap("train", "recipes/quickstart.yaml", *cut, "--runs-dir", str(runs), cache=shared_cache)
    assert result.returncode == 0, result.stderr
    return runs / "quickstart", result


@pytest.fixture(scope="session")
def chat_runs(quickstart, shared_cache):
    """The run folder with both stages of the chat quickstart, also cut short, and the output of the command."""
    from support import CHAT_CUT, lap

    run, _ = quickstart
    result = lap("sft", "recipes/chat_quickstart.yaml", *CHAT_CUT, "--runs-dir", str(run.parent), cache=shared_cache)
    assert result.returncode == 0, result.stderr
    return run.parent, result
