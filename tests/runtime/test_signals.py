"""Signals when there is nothing to save, signals to data workers, and a closed log pipe."""

import os
import signal
import subprocess
import sys

import pytest
from support import HANG, start_process

from lapcli.runtime.errors import Interrupted
from lapcli.runtime.signals import stop_at_once, stop_on_signal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_with_nothing_to_save_exits_cleanly(number):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"stopped by {number.name}; what was saved is kept"), stop_at_once():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_a_child_with_the_inherited_handler_prints_nothing():
    said = []
    with stop_on_signal(said.append) as stop:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(0 if not stop and not said else 1)
        assert os.waitpid(child, 0)[1] == 0
        os.kill(os.getpid(), signal.SIGINT)
        assert (bool(stop), said) == (True, ["SIGINT"])


def test_only_a_second_ctrl_c_stops_at_once():
    for first in ("SIGTERM", "SIGINT", "SIGUSR1"):
        with stop_on_signal(lambda name: None) as stop:
            os.kill(os.getpid(), signal.Signals[first])
            os.kill(os.getpid(), signal.SIGTERM)  # `timeout` signals the process and its group
            os.kill(os.getpid(), signal.SIGUSR1)  # a batch system's last warning
            assert stop.name == first
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_process_exits_with_its_parent(is_late):
    """Stopped or not, and also if the parent died before the process asked for it."""
    inner = (
        "import os, signal, time; from lapcli.runtime.signals import end_with_parent\n"
        f"parent = {1 << 30 if is_late else 'os.getppid()'}\n"
        "end_with_parent(parent, signal.SIGKILL); print(os.getpid(), flush=True); time.sleep(600)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    parent = start_process([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    said = parent.stdout.readline() if not is_late else ""
    if said:
        os.kill(int(said), signal.SIGSTOP)
        parent.kill()
    assert parent.stdout.read() == ""  # the pipe is closed: whoever had it has ended
    parent.wait(timeout=HANG)


def test_a_closed_log_pipe_does_not_stop_the_run(tmp_path):
    code = (
        "from lapcli.runtime.progress import LogConsole\nconsole = LogConsole()\n"
        "for _ in range(3000): console.print('x' * 100)\nopen('done', 'w')"
    )
    writer = start_process([sys.executable, "-c", code], stderr=subprocess.PIPE, cwd=tmp_path)
    writer.stderr.read(1)
    writer.stderr.close()
    assert writer.wait(timeout=HANG) == 0
    assert (tmp_path / "done").exists()
