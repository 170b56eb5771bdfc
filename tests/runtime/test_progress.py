"""Progress lines of a training run."""

import io

import pytest

from lapcli.runtime import progress
from lapcli.runtime.progress import LogConsole, StepProgress


@pytest.mark.parametrize("first", [0, 40])
@pytest.mark.parametrize("on_terminal", [False, True])
def test_the_time_left_is_printed_after_five_steps(monkeypatch, first, on_terminal):
    """The first step, which compiles for 100 s, does not count; the others take 2 s each."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    console = LogConsole(io.StringIO())
    shown = []
    with StepProgress(console, first, first + 10, "tokens") as bar:
        for taken in range(1, 11):
            now += 100 if taken == 1 else 2
            bar.step(first + taken, 1.0, 0.1, None)
            shown.append(bar._bar.tasks[0].description if on_terminal else console.file.getvalue().splitlines()[-1])
    assert ["left" in text for text in shown] == [taken >= 5 for taken in range(1, 11)]
    assert [text.split()[-2] for text in shown[4:]] == ["10s", "8s", "6s", "4s", "2s", "0s"]
