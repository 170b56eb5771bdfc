"""Runs from anywhere: keys missing from run.json, values of other types, pipes and devices in place of files. Every
command that looks at a run says in one sentence what is wrong, or works without that part; none waits for a pipe.
"""

import json
import os
import shutil

import pytest
from support import run_main, train_here
from sweep_support import write_recipe

from lapcli.recipe import load_recipe
from lapcli.runtime.files import read_checked_json, write_checked_json

COMMANDS = (
    ["runs"],
    ["runs", "show", "tiny"],
    ["watch", "tiny"],
    ["report"],
    ["eval", "--run", "tiny", "--tasks", "bpb"],
    ["sample", "--run", "tiny", "--prompt", "the", "--max-tokens", "2"],
    ["train", "RECIPE"],
)
PARTS = ("run.json", "recipe.yaml", "metrics.jsonl", "summary.json", "tokenizer.json", ".lock")
WEIGHTS = ("checkpoints/step-000002/state.json", "checkpoints/step-000002/model.safetensors")
#: Keys for people: nothing is decided by them.
NOT_NEEDED = {"format", "name", "host", "pid", "created", "updated", "failure", "world_size", "threads", "device"}


@pytest.fixture(scope="module")
def home(tmp_path_factory, shared_cache):
    folder = tmp_path_factory.mktemp("hostile")
    recipe = write_recipe(folder, train={"steps": 2}, checkpoint={"every": 2}, validation={"tokens": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        train_here(load_recipe(recipe), folder / "runs", "tiny")
    return folder


@pytest.fixture
def runs(home, tmp_path):
    shutil.copytree(home / "runs", tmp_path / "runs")
    return tmp_path / "runs"


def try_all(capsys, home, runs) -> dict[str, int]:
    """Each command ends with a result or one sentence; the exit codes."""
    codes = {}
    for command in COMMANDS:
        arguments = [str(home / "tiny.yaml") if word == "RECIPE" else word for word in command]
        code, out, err = run_main(capsys, *arguments, "--runs-dir", str(runs))
        said = [line for line in err.splitlines() if line.startswith("lap: ")]
        assert code in (0, 2), (command, err)
        assert len(said) == 1 or (code == 0 and not said), (command, err)
        assert "Traceback" not in err + out
        codes[command[0]] = code
    return codes


def keys_of_a_run() -> list[str]:
    return ["objective", "status", "step", "steps", "seed", "versions", "weights_sha256", "metrics", "data_sha256"]


@pytest.mark.parametrize("key", keys_of_a_run())
def test_a_run_without_a_key(home, runs, capsys, key):
    info = read_checked_json(runs / "tiny" / "run.json", "")
    assert key in info
    del info[key]
    write_checked_json(runs / "tiny" / "run.json", info)
    codes = try_all(capsys, home, runs)
    if key in ("objective", "status", "step"):
        assert codes["eval"] == codes["train"] == 2


@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, True, 1.5, None])
def test_a_run_whose_keys_hold_something_else(home, runs, capsys, value):
    info = read_checked_json(runs / "tiny" / "run.json", "")
    write_checked_json(runs / "tiny" / "run.json", {**info, "step": value, "steps": value, "weights_sha256": value})
    assert try_all(capsys, home, runs)["eval"] == 2


@pytest.mark.parametrize("content", [b"{}", b"[]", b"[" * 100_000, b"", b"\xff\xfe", b'{"format": 2}', b"1e999"])
def test_a_file_that_is_no_description_of_a_run(home, runs, capsys, content):
    (runs / "tiny" / "run.json").write_bytes(content)
    assert try_all(capsys, home, runs)["eval"] == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop"])
@pytest.mark.parametrize("part", [*PARTS, *WEIGHTS])
def test_something_else_in_place_of_a_file(home, runs, capsys, part, kind):
    path = runs / "tiny" / part
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    codes = try_all(capsys, home, runs)
    if part not in (".lock", "summary.json", "metrics.jsonl"):
        assert codes["eval"] == 2


def test_json_that_says_what_it_should_not(home, runs):
    """The list above names keys that a run really has."""
    info = json.loads((runs / "tiny" / "run.json").read_text())
    assert set(keys_of_a_run()) <= info.keys() - NOT_NEEDED
