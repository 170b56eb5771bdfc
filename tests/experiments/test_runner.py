"""Running sweeps: killed, finished, with a failing cell, beside another sweep, by a SLURM script, in parts."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support import HANG, ROOT, lap, run_main, run_process, start_lap, train_here
from sweep_support import sweep_of, train_cells, write_recipe

from lapcli.experiments import overview
from lapcli.experiments.cells import lock_cell, log_of
from lapcli.experiments.runner import Chooser, Runner, share_machine
from lapcli.runtime.environment import usable_cores
from lapcli.runtime.files import read_json
from lapcli.runtime.progress import LogConsole

STEPS = 120
HEADS = "model.laplacian_heads"


def steps_of(run):
    try:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return []
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.long
def test_killed_twice_stopped_once_and_finished(tmp_path, shared_cache):
    """Nothing is lost or done twice, and the weights equal those of uninterrupted runs."""
    recipe = write_recipe(tmp_path, train={"steps": STEPS}, checkpoint={"every": 20}, validation={"every": 60})
    runs = tmp_path / "runs"
    over = {HEADS: [0, 4]}
    arguments = [str(recipe), "--over", f"{HEADS}=0,4", "--runs-dir", str(runs)]
    first, second = (runs / name for name in ("tiny-0L", "tiny-4L"))
    for run, step, kind in ((first, 5, signal.SIGKILL), (second, 5, signal.SIGKILL), (second, 40, signal.SIGTERM)):
        sweep = start_lap("sweep", *arguments, cache=shared_cache)
        sweep.wait_for(lambda run=run, step=step: any(found >= step for found in steps_of(run)[-1:]))
        sweep.send(kind)
        stopped = sweep.result()
        assert stopped.returncode == (75 if kind == signal.SIGTERM else -kind), stopped.stderr
    assert "Run the same command" in stopped.stderr
    info = json.loads((second / "run.json").read_text())
    assert info["status"] == "interrupted"
    assert info["step"] == steps_of(second)[-1]
    result = lap("sweep", *arguments, cache=shared_cache)
    assert result.returncode == 0, result.stderr
    assert "tiny-0L: training" not in result.stderr  # it was finished before
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:]] == [
        [run.name, "finished", f"{STEPS}/{STEPS}"] for run in (first, second)
    ]
    for cell in sweep_of(recipe, over=over).grids[0].cells():
        assert steps_of(runs / cell.name) == list(range(1, STEPS + 1))
        alone = train_here(cell.loaded, tmp_path / "alone", cell.name)
        assert json.loads((runs / cell.name / "run.json").read_text())["weights_sha256"] == alone.info["weights_sha256"]


def test_a_failing_cell_is_shown_and_stops_no_other(tmp_path, capsys):
    recipe = write_recipe(tmp_path)
    runs = tmp_path / "runs"
    missing, there = tmp_path / "no.txt", tmp_path / "text.txt"
    over = ["--over", f"data.train={missing},{there}"]
    code, out, err = run_main(capsys, "sweep", str(recipe), *over, "--runs-dir", str(runs), "--json")
    assert code == 1
    failed, finished = json.loads(out)["cells"]
    assert (failed["state"], finished["state"]) == ("failed", "finished")
    assert str(missing) in failed["reason"]
    assert "Traceback" not in err
    assert finished["validation"]["validation_loss"] > 0


@pytest.mark.long
def test_a_cell_in_another_sweep_is_awaited_and_not_trained_twice(tmp_path):
    recipe, runs = write_recipe(tmp_path), tmp_path / "runs"
    (cell,) = sweep_of(recipe, over={"seed": [7]}).grids[0].cells()
    other = lock_cell(cell.name, runs)
    told = []

    def tell(text):
        """The other sweep finishes the cell while we wait."""
        told.append(text)
        train_cells([cell], runs)
        other.close()

    statuses = Runner(Chooser([cell], runs), runs, tell=tell).run()
    assert (len(told), [status.state for status in statuses]) == (1, ["finished"])
    assert not log_of(cell.name, runs).exists()


def test_names_of_another_recipe_are_refused_before_anything_starts(tmp_path, capsys):
    recipe, runs = write_recipe(tmp_path), tmp_path / "runs"
    train_cells(sweep_of(recipe, over={"seed": [1, 2]}).grids[0].cells(), runs)
    arguments = [str(recipe), "--over", "seed=1,2,3", "--runs-dir", str(runs), "--set", "optimizer.lr=0.5"]
    for mode in ([], ["--dry-run"], ["--slurm"]):
        code, out, err = run_main(capsys, "sweep", *arguments, *mode)
        assert (code, out) == (2, "")
        assert "tiny-seed1: optimizer.lr" in err
    assert not (runs / "tiny-seed3").exists()


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="SLURM runs bash")
def test_the_slurm_script_finishes_the_cell_of_its_task(tmp_path, shared_cache):
    """The script's body under bash, as SLURM would start task 1; and the commands after the training run."""
    runs = tmp_path / "runs"
    keys = ("train.steps=3", "schedule.warmup_epochs=0", "validation.every=3", "data.workers=0")
    cut = [part for key in keys for part in ("--set", key)]
    arguments = ["recipes/vit_digits.yaml", "--over", f"{HEADS}=[0, 1, 2, 4],linear(4, 0)", *cut]
    script = lap("sweep", *arguments, "--then", "eval --tasks top1", "--runs-dir", str(runs), "--jobs", "2", "--slurm")
    assert script.returncode == 0, script.stderr
    assert "#SBATCH --array=0-1%2\n" in script.stdout
    (log,) = re.findall(r"^#SBATCH --output=(.*)$", script.stdout, re.MULTILINE)
    assert Path(log).parent.is_dir()  # SLURM does not make it
    environment = {**os.environ, "LAP_CACHE": str(shared_cache), "SLURM_ARRAY_TASK_ID": "1", "PYTHONPATH": str(ROOT)}
    done = run_process(["bash"], input=script.stdout, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    (run,) = [path for path in runs.iterdir() if path.name != ".sweeps"]
    assert run.name == "vit_digits-linear_4_0L"
    info = json.loads((run / "run.json").read_text())
    assert (info["status"], info["step"]) == ("finished", 3)
    done_then = read_json(run / "sweep.json", "train it again")
    assert done_then == {f"eval --tasks top1 --run {run.name}": info["weights_sha256"]}
    assert list((run / "eval").iterdir())
    again = lap("sweep", *arguments, "--then", "eval --tasks top1", "--runs-dir", str(runs), "--dry-run", "--json")
    assert [cell["state"] for cell in json.loads(again.stdout)["cells"]] == ["new", "finished"]


@pytest.mark.parametrize(
    ("gpus", "jobs", "shares", "words"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"], "1 GPU each"),
        ("0,1,2,3", 2, ["0,1", "2,3"], "2 GPUs each"),
        ("4,6,7", 2, ["4", "6"], "1 GPU each, 1 idle"),
        ("GPU-a,GPU-b", 3, ["GPU-a", "GPU-b", "GPU-a"], "sharing 2 GPUs"),
    ],
)
def test_gpus(gpus, jobs, shares, words, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    slots, said = share_machine(jobs)
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == shares
    assert words in said


def test_threads_are_divided_and_at_least_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    for jobs in (2, 1000):
        threads = [int(slot["OMP_NUM_THREADS"]) for slot in share_machine(jobs)[0]]
        assert len(threads) == jobs
        assert min(threads) >= 1
        assert sum(threads) <= max(usable_cores(), jobs)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in share_machine(2)[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("on_terminal", [False, True])
def test_progress_of_the_cells(tmp_path, shared_cache, monkeypatch, on_terminal):
    """Finished cells of the total, step and loss of the running cell, and the time left after some steps."""
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    monkeypatch.setattr(overview, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(overview, "SECONDS_BETWEEN_UPDATES", 0.0)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    recipe = write_recipe(tmp_path, train={"steps": 300})
    cells = sweep_of(recipe, over={"seed": [0, 1]}).grids[0].cells()
    console = LogConsole(io.StringIO())
    Runner(Chooser(cells, tmp_path / "runs"), tmp_path / "runs", tell=console.print, console=console).run()
    printed = console.file.getvalue()
    assert ("\x1b[" in printed) == on_terminal  # drawn over on a terminal, lines elsewhere
    shown = re.findall(
        r"(\d) of 2 cells done(, about \S+ left)?;?\s+tiny-seed(\d): step (\d+)/300, loss \d+\.\d{4}", printed
    )
    assert {(done, seed) for done, _, seed, _ in shown} == {("0", "0"), ("1", "1")}
    assert all(left for _, left, _, step in shown if int(step) >= 5)
    assert not any(left for done, left, _, step in shown if int(step) < 5 and done == "0")
