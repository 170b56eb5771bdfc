"""Mirrors in the real trackers, offline, read back from their own files: every step once, whatever was killed."""

import json
import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import exit_code, process, run_main, tiny_recipe
from tracking_support import tensorboard_scalars, wandb_scalars

from lapcli.runs import open_run, read_run, unlock
from lapcli.runtime.errors import LapError, UsageError
from lapcli.runtime.files import write_json
from lapcli.tracking.mirror import mirror
from lapcli.tracking.tracker import run_id
from lapcli.tracking.trackers import TensorBoard, Trackio, WandB

LAST = 9


@pytest.fixture
def run(tmp_path):
    """A run that was interrupted after nine steps, with a validation at every third and at the beginning."""
    run = open_run(tmp_path / "runs", "mine", tiny_recipe(tmp_path / "text.txt"))
    write_lines(run, LAST)
    run.update(status="interrupted", step=LAST, steps=20)
    unlock(run)
    return run


def lines_until(last):
    for step in range(last + 1):
        if step:
            yield {"step": step, "loss": 1 / step, "lr": 0.1, "seconds": 0.5}
        if step % 3 == 0:
            yield {"step": step, "validation_loss": 2.0 - step / 10}


def write_lines(run, last):
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines_until(last)))


def tracker_of(name):
    if name == "trackio":
        pytest.importorskip("trackio", reason="trackio is not installed; pip install 'lapcli[trackio]'")
    return {"tensorboard": TensorBoard, "wandb": lambda: WandB(offline=True), "trackio": Trackio}[name]()


@pytest.fixture(autouse=True)
def _own_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def read_back(name, run):
    """{tag: [(step, value), ...]} of everything that the tracker holds, in the order of its files."""
    if name == "wandb":
        assert list(run.path.glob(f"track/wandb/offline-run-*/run-{run_id(run)}.wandb"))
    return {"tensorboard": _events, "wandb": lambda run: wandb_scalars(run.path), "trackio": _trackio_rows}[name](run)


def _events(run):
    return tensorboard_scalars(run.path)


def _trackio_rows(run):
    """From the database itself: what `trackio show` would draw."""
    history = {}
    with closing(sqlite3.connect(os.path.join(os.environ["TRACKIO_DIR"], "lap.db"))) as store:
        rows = store.execute("SELECT step, metrics, run_name FROM metrics ORDER BY id").fetchall()
    assert {name for _, _, name in rows} == {f"mine-{run_id(run)[:8]}"}
    for step, metrics, _ in rows:
        for tag, value in json.loads(metrics).items():
            history.setdefault(tag, []).append((step, value))
    return history


def check_whole(held, last):
    lines = list(lines_until(last))
    for tag, name in (("train/loss", "loss"), ("train/lr", "lr"), ("validation/loss", "validation_loss")):
        expected = [(line["step"], pytest.approx(line[name])) for line in lines if name in line]
        assert sorted(held[tag]) == expected


def killed_mirror(path, name, step):
    """In a process of its own: SIGKILL when that step is about to be sent, and those before are stored."""
    os.environ["TRACKIO_DIR"] = str(path.parent.parent / "trackio")
    from lapcli.tracking.trackers import tensorboard, trackio, wandb

    kind = {"tensorboard": tensorboard.EventFile, "wandb": wandb.WandBRun, "trackio": trackio.TrackioRun}[name]
    send = kind.scalars

    def scalars(self, at, values):
        if at == step:
            time.sleep(2 if name == "trackio" else 0)  # it writes twice a second, from a thread
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, at, values)

    kind.scalars = scalars
    mirror([path], tracker_of(name))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_after_two_kills_every_step_is_there_once(name, run):
    tracker_of(name)  # skips where it is not installed
    for step in (4, 8):
        child = process(killed_mirror, run.path, name, step)
        child.start()
        assert exit_code(child) == -signal.SIGKILL
    assert mirror([run.path], tracker_of(name))[0].steps == LAST + 1
    check_whole(read_back(name, run), LAST)
    write_lines(run, LAST + 5)  # the run was resumed, and goes on
    child = process(killed_mirror, run.path, name, LAST + 3)
    child.start()
    exit_code(child)
    sent = 5 if name != "trackio" else LAST + 6  # trackio removes no single steps, so that all are sent again
    assert mirror([run.path], tracker_of(name))[0].steps == sent
    assert mirror([run.path], tracker_of(name))[0].steps == 0
    check_whole(read_back(name, run), LAST + 5)


def mirror_beside(path, service):
    os.environ["WANDB_SERVICE"] = service
    mirror([path], WandB(offline=True))


def test_the_wandb_service_of_another_process_is_not_used(run):
    """It would outlive a kill and refuse the run's id to the next session for a while; this one has ended."""
    child = process(mirror_beside, run.path, "3-1-unix-/nowhere")
    child.start()
    assert exit_code(child) == 0
    check_whole(read_back("wandb", run), LAST)


def mirror_without_service(path):
    """In a process of its own: W&B's service is killed when the last step is about to be sent."""
    from lapcli.tracking.trackers import wandb

    send = wandb.WandBRun.scalars

    def scalars(self, at, values):
        if at == LAST:
            for task in Path("/proc/self/task").iterdir():
                for child in (task / "children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)
        send(self, at, values)

    wandb.WandBRun.scalars = scalars
    with pytest.raises(LapError, match="W&B"):
        mirror([path], WandB(offline=True))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the service in /proc")
def test_what_wandb_did_not_finish_is_sent_again(run):
    child = process(mirror_without_service, run.path)
    child.start()
    assert exit_code(child) == 0
    assert mirror([run.path], WandB(offline=True))[0].steps == LAST + 1
    check_whole(read_back("wandb", run), LAST)


def test_the_newest_step_of_a_running_run_waits_for_its_validation(tmp_path):
    run = open_run(tmp_path / "runs", "mine", tiny_recipe(tmp_path / "text.txt"))
    lines = list(lines_until(9))
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:-1]))  # step 9 without its validation
    assert mirror([run.path], TensorBoard())[0].steps == 9
    write_lines(run, 9)
    run.update(status="interrupted")
    unlock(run)
    assert mirror([run.path], TensorBoard(), follow=True)[0].steps == 1
    check_whole(_events(run), 9)


def test_a_run_that_is_being_trained_is_followed_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("lapcli.tracking.mirror._POLL", 0.05)
    run = open_run(tmp_path / "runs", "mine", tiny_recipe(tmp_path / "text.txt"))
    write_lines(run, 1)

    def train():
        with run.metrics.open("a") as metrics:
            for line in lines_until(9):
                if line["step"] > 1:
                    metrics.write(json.dumps(line) + "\n")
                    metrics.flush()
                    time.sleep(0.02)
        run.update(status="interrupted", step=9)
        unlock(run)

    trainer = threading.Thread(target=train)
    trainer.start()
    sent = mirror([run.path], TensorBoard(), follow=True)
    trainer.join()
    assert sent[0].steps == 10
    check_whole(_events(run), 9)


def test_a_followed_run_that_is_renamed_is_named(tmp_path, monkeypatch):
    run = open_run(tmp_path / "runs", "mine", tiny_recipe(tmp_path / "text.txt"))
    write_lines(run, 4)
    mirror([run.path], TensorBoard())  # nothing is left to send: no session is open when the run goes away
    new = run.path.with_name("new")
    monkeypatch.setattr("lapcli.tracking.mirror.time.sleep", lambda seconds: run.path.rename(new))
    with pytest.raises(UsageError, match=r"runs/mine is not a run directory: it has no run\.json"):
        mirror([run.path], TensorBoard(), follow=True)
    monkeypatch.undo()
    mirror([new], TensorBoard())
    assert _events(read_run(new))["train/loss"] == [(step, pytest.approx(1 / step)) for step in (1, 2, 3)]


def test_evaluations_are_sent_once_and_again_when_they_change(run):
    (run.path / "eval").mkdir()
    for value in (0.5, 0.75):
        told = {"tasks": {"top1": {"value": value}}, "step": 6}
        write_json(run.path / "eval" / "top1.json", told)
        assert mirror([run.path], TensorBoard())[0].items >= 1
        assert mirror([run.path], TensorBoard())[0].items == 0
    assert _events(run)["eval/top1"] == [(6, 0.5), (6, 0.75)]


def test_the_recipe_goes_along(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mirror([run.path], TensorBoard())
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("recipe/text_summary")
    assert (run.path / "recipe.yaml").read_text() in text.tensor_proto.string_val[0].decode()


def test_nothing_of_the_run_itself_changes(run):
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}
    mirror([run.path], TensorBoard())
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()} == before
    assert read_run(run.path).status == "interrupted"


def test_the_command_and_its_mistakes(run, capsys, monkeypatch):
    monkeypatch.setenv("LAP_RUNS", str(run.path.parent))
    code, out, _ = run_main(capsys, "track", "mine", "--to", "tensorboard", "--json")
    assert (code, json.loads(out)) == (0, [{"run": "mine", "steps": 10, "items": 1}])
    assert "0 steps" in run_main(capsys, "track", "mi*", "--to", "tensorboard")[1]
    mistakes = {
        ("mine",): "--to",
        ("nine", "--to", "tensorboard"): "did you mean mine?",
        ("mine", "--to", "tensorbord"): "tensorboard",
        ("mine", "--to", "tensorboard", "--offline"): "--to wandb",
        ("mine", "--to", "tensorboard", "--project", "p"): "leave it out",
        ("mine", "--to", "trackio", "--offline"): "leave it out",
        ("--to", "wandb"): "RUNS",
    }
    for words, said in mistakes.items():
        code, out, err = run_main(capsys, "track", *words)
        assert (code, out, said in err) == (2, "", True), err


def test_a_package_that_is_not_installed_is_named(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'lapcli\[wandb\]'"):
        mirror([run.path], WandB(offline=True))


def test_one_writer_at_a_time(run):
    (run.path / "track").mkdir()
    with (run.path / "track" / "tensorboard.lock").open("w") as handle:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="by another process"):
            mirror([run.path], TensorBoard())
