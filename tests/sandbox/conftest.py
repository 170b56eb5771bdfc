"""The sandbox modes available on this machine, and a final line about the others."""

import pytest
from support import skip_if_quick

from lapcli.sandbox import Mode
from lapcli.sandbox.run import probe

SAFE = (Mode.BUBBLEWRAP, Mode.LANDLOCK)
_used: set[Mode] = set()


@pytest.fixture(params=SAFE, ids=[mode.name.lower() for mode in SAFE])
def mode(request) -> Mode:
    """Each sandbox in turn; skips if this machine does not have it."""
    skip_if_quick("it starts a process")
    problem = probe(request.param)
    if problem is not None:
        pytest.skip(f"cannot try {request.param}: {problem}")
    _used.add(request.param)
    return request.param


@pytest.fixture
def any_mode() -> Mode:
    """The first working sandbox, for tests that work with any."""
    skip_if_quick("it starts a process")
    for candidate in reversed(SAFE):
        if probe(candidate) is None:
            _used.add(candidate)
            return candidate
    pytest.skip("this machine has no sandbox")


def pytest_terminal_summary(terminalreporter):
    tried = ", ".join(sorted(_used)) or "none"
    missing = [f"{mode} ({problem})" for mode in SAFE if _used and (problem := probe(mode)) is not None]
    terminalreporter.write_line(f"sandboxes tried: {tried}" + "".join(f"; not tried: {text}" for text in missing))
