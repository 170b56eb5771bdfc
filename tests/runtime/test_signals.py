"""Signals before the first step, signals to those who read for a run, and a reader of its log who goes away."""

import os
import signal
import subprocess
import sys

import pytest

from lapcli.runtime.errors import Interrupted
from lapcli.runtime.signals import stop_before_the_first_step, stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_before_the_first_step_ends_the_command_in_order(number):
    before = signal.getsignal(number)
    with (
        pytest.raises(Interrupted, match=f"stopped by {number.name} before the first step"),
        stop_before_the_first_step(),
    ):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_child_that_inherits_the_handler_says_nothing():
    said = []
    with stop_on_signal(said.append) as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0 if not stop and not said else 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert (bool(stop), said) == (True, ["SIGINT"])


def test_a_reader_who_goes_away_does_not_end_the_run(tmp_path):
    code = (
        "from lapcli.runtime.console import LogConsole\nconsole = LogConsole()\n"
        "for _ in range(3000): console.print('x' * 100)\nopen('done', 'w')"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=tmp_path)
    writer.stderr.read(1)
    writer.stderr.close()
    assert writer.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()
