"""Folders that cannot be written, read or entered, and full disks: one sentence, and no files left behind."""

import ctypes
import json
import os
import subprocess
import sys

import pytest
from image_support import write_folder
from support import ROOT, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe

_LIBC = ctypes.CDLL(None)
_DROP = 24  # PR_CAPBSET_DROP of Linux's prctl
_OVERRIDES = (1, 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, by which root may enter any folder

#: Runs commands one after the other in one process; each prints its result as a line of JSON.
SCRIPT = """
import contextlib, io, json, os, sys
from lapcli.cli import main

def run(arguments, environment):
    os.environ.update(environment)
    sys.argv = ["lap", *arguments]
    code, out, err = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
    print(json.dumps([code, err.getvalue()]), flush=True)

for arguments, environment, before in json.loads(sys.argv[1]):
    if before:
        assert os.system(before) == 0
    run(arguments, environment)
"""


def run_all(commands: list, *, prefix: list[str] = (), **options) -> list[tuple[int, str]]:
    """(arguments, environment, a shell command before it) to (exit code, its output)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    called = [*prefix, sys.executable, "-c", SCRIPT, json.dumps(commands)]
    done = subprocess.run(called, capture_output=True, text=True, env=environment, check=False, **options)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[")]


def assert_one_sentence(code: int, err: str) -> None:
    assert code in (1, 2), err
    assert "Traceback" not in err
    assert "[Errno" not in err
    assert sum(line.startswith(("lap: ", "Error: ")) for line in err.splitlines()) == 1, err


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    write_recipe(folder, train={"steps": 2}, checkpoint={"every": 1, "keep": 1}, validation={"every": None})
    train_here(load_recipe(folder / "tiny.yaml"), folder / "runs", "tiny")
    return folder


def _without_overrides() -> None:
    """Runs before a program starts: file permissions then also apply to root."""
    for capability in _OVERRIDES:
        _LIBC.prctl(_DROP, capability, 0, 0, 0)


@pytest.mark.long
def test_folders_without_permission(home, tmp_path):
    closed, fixed, cache = tmp_path / "closed", tmp_path / "fixed", str(tmp_path / "cache")
    closed.mkdir(mode=0o000)
    fixed.mkdir(mode=0o555)
    recipe, runs = str(home / "tiny.yaml"), ["--run", "tiny", "--runs-dir", str(home / "runs")]
    commands = []
    for place in (closed, fixed):
        below = str(place / "a" / "b")
        commands += [
            (["train", recipe, "--runs-dir", below], {"LAP_CACHE": cache}),
            (["train", recipe, "--name", "other", "--runs-dir", str(tmp_path / "runs")], {"LAP_CACHE": below}),
            (["fetch", recipe], {"LAP_CACHE": below}),
            (["sweep", recipe, "--over", "seed=1,2", "--runs-dir", below], {"LAP_CACHE": cache}),
            (["export", "--to", "safetensors", "--no-verify", "--out", below, *runs], {"LAP_CACHE": cache}),
            (["analyze", "cossim", "--out", below, *runs], {"LAP_CACHE": cache}),
            (["init", below], {"LAP_CACHE": cache}),
        ]
    for command in (["eval", "--tasks", "bpb"], ["analyze", "cossim"], ["report"], ["runs"], ["watch"], ["chat"]):
        commands.append(([*command, "--runs-dir", str(closed / "runs")], {"LAP_CACHE": cache}))
    commands.append((["train", recipe, "--data", str(closed / "text.txt")], {"LAP_CACHE": cache}))
    images = write_folder(tmp_path / "images", {"train": {"ants": 3, "bees": 3}})
    bees = images / "train" / "bees"
    bees.chmod(0o000)
    commands.append((["train", "vit_digits", "--data", str(images)], {"LAP_CACHE": cache}))
    try:
        results = run_all([(*command, "") for command in commands], cwd=tmp_path, preexec_fn=_without_overrides)
    finally:
        closed.chmod(0o755)
        bees.chmod(0o755)
    assert len(results) == len(commands)
    assert "bees cannot be read (Permission denied)" in " ".join(results[-1][1].split())
    for code, err in results:
        assert_one_sentence(code, err)
    assert not any(closed.iterdir())
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir())


def can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_disk_that_is_too_small_for_the_checkpoints(home, tmp_path):
    """Refused before the first step: one sentence with the disk, the sizes, and the key to lower."""
    if not can_mount():
        pytest.skip("a small file system can be mounted by root alone")
    disk = tmp_path / "disk"
    disk.mkdir()
    runs = ["--runs-dir", str(disk / "runs"), "--set", "train.steps=50", "--set", "checkpoint.keep=40"]
    cache = {"LAP_CACHE": str(tmp_path / "cache")}
    train = ["train", str(home / "tiny.yaml"), *runs]
    sweep = ["sweep", str(home / "tiny.yaml"), "--over", "seed=0,1", *runs]
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$0" "$@"']
    nothing = f"test ! -e {disk}/runs/tiny/run.json"
    for code, err in run_all([(train, cache, ""), (sweep, cache, nothing)], prefix=mounted):
        assert_one_sentence(code, err)
        assert code == 2
        for named in (str(disk), "checkpoint.keep", "tiny" if "all cells" not in err else "cells"):
            assert named in " ".join(err.split())


@pytest.mark.long
@pytest.mark.parametrize("room", [16, 300])
def test_a_disk_that_fills_up_in_training(home, tmp_path, room):
    """For any size in kB: one sentence and no stray files, and with more space the same command finishes the run."""
    if not can_mount():
        pytest.skip("a small file system can be mounted by root alone")
    disk = tmp_path / "disk"
    disk.mkdir()
    train = ["train", str(home / "tiny.yaml"), "--runs-dir", str(disk / "runs")]
    cache = {"LAP_CACHE": str(disk / "cache")}
    litter = f"find {disk} -name '.*' -not -name .lock -o -name '*.unfinished' | (! grep .)"
    commands = [
        (train, cache, f"mount -o remount,size={room}k {disk}"),
        (train, cache, f"{litter} && mount -o remount,size=64m {disk}"),
    ]
    mounted = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs tmpfs {disk} && exec "$0" "$@"']
    (code, err), (again, _) = run_all(commands, prefix=mounted)
    assert again == 0
    if code or room < 900:
        assert_one_sentence(code, err)
