"""Ctrl-C as a terminal sends it, to a command and its children: the documented message, and no process remains."""

import os
import signal
import subprocess
import sys

import pytest
from support import HANG, ROOT, start_lap, start_process, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe

STOPPED = "lap: stopped; what was saved is kept, run the same command to resume"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the processes of a session are listed in /proc")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ctrl-c")
    write_recipe(folder, train={"steps": 2}, validation={"every": None})
    train_here(load_recipe(folder / "tiny.yaml"), folder / "runs", "tiny")
    return folder


def files_below(folder):
    return {path for path in folder.rglob("*") if path.name != ".lock"}


@pytest.mark.parametrize("command", ["eval --run tiny --tasks bpb"])
def test_ctrl_c_during_computation(command, home, shared_cache):
    """There is nothing new to save: exit code 130, as for any program stopped by Ctrl-C."""
    words = [*command.replace("RECIPE", str(home / "tiny.yaml")).split(), "--runs-dir", str(home / "runs")]
    before = files_below(home)
    running = start_lap(*words, cache=shared_cache, pauses=True)
    running.wait_for_pause()
    running.press_ctrl_c()
    stopped = running.result()
    assert (stopped.returncode, stopped.stdout) == (130, ""), stopped.stderr
    assert stopped.stderr.splitlines()[-1] == STOPPED
    assert "Traceback" not in stopped.stderr
    running.wait_for_the_others()
    assert files_below(home) == before


IMPORTS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore it
module = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from lapcli.__main__ import main
main()
"""


@pytest.mark.parametrize(("module", "code"), [("typer", -signal.SIGINT), ("torch.nn", 130)])
def test_ctrl_c_in_the_middle_of_an_import(module, code, home):
    """The command exits like any program. Of a library: as ever."""
    words = [sys.executable, "-c", IMPORTS, module, "plan", str(home / "tiny.yaml")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    plan = start_process(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    out, err = plan.communicate(timeout=HANG)
    assert (plan.returncode, out) == (code, ""), err
    assert err.splitlines()[-1:] == ([STOPPED] if code == 130 else [])
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["runs", "recipes quickstart --print"])
def test_a_closed_output_pipe(command, home):
    """`lap ... | head -1`: no message, since the reader has its output."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "lapcli", *command.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LAP_RUNS": str(home / "runs")}
    running = start_process(words, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert running.communicate(timeout=HANG)[1] == ""
    assert running.returncode == 1
