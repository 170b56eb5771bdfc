"""A run records the packages whose entries it uses; another version is a warning, a missing package one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_support import TINY_IMAGES
from support import run_process

ROOT = Path(__file__).parent.parent

HEAVY_BALL = """
from typing import Literal

from lapcli.recipe.optimizers import OptimizerSection


class Section(OptimizerSection):
    name: Literal["heavy_ball"] = "heavy_ball"


class HeavyBall:
    name, section, clips_itself = "heavy_ball", Section, False

    def build(self, groups):
        import torch

        from lapcli.training.optimizers import as_param_groups

        return torch.optim.SGD(as_param_groups(groups))

    def new_state(self, p):
        return {}

    def read_state(self, optimizer, group, p):
        return {}

    def write_state(self, optimizer, group, p, state):
        pass


def register(extensions):
    extensions.add("optimizer", HeavyBall())
"""


def install(folder: Path, version: str) -> Path:
    """A package as pip would leave it: a module, and metadata with one entry point."""
    folder.mkdir()
    (folder / "heavy_ball.py").write_text(HEAVY_BALL)
    metadata = folder / f"heavy_ball-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: heavy-ball\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text("[lap.plugins]\nheavy_ball = heavy_ball\n")
    return folder


def lap(package: Path | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*([str(package)] if package else []), str(ROOT)])
    return run_process(
        [sys.executable, "-m", "lapcli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_cache):
    """A run that was begun with version 1.2 and finished with 1.3, and what the second start printed."""
    folder = tmp_path_factory.mktemp("plugins")
    recipe = {**TINY_IMAGES, "optimizer": {"name": "heavy_ball", "lr": 0.03}}
    recipe["train"] = {**TINY_IMAGES["train"], "steps": 4}
    recipe["data"] = {**TINY_IMAGES["data"], "workers": 0}
    (folder / "tiny.yaml").write_text(json.dumps(recipe))
    command = ["train", str(folder / "tiny.yaml"), "--runs-dir", str(folder / "runs"), "--nproc", "1"]
    first = install(folder / "first", "1.2")
    code = "import os, sys, lapcli.checkpoint as c; c.prune = lambda folder, step, *more: step and os._exit(9); "
    code += "sys.argv[0] = 'lap'; from lapcli.cli import main; main()"
    path = os.pathsep.join([str(first), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "LAP_CACHE": str(shared_cache)}
    cut = run_process([sys.executable, "-c", code, *command], env=environment, check=False)
    assert cut.returncode == 9
    before = json.loads((folder / "runs" / "tiny" / "run.json").read_text())
    second = lap(install(folder / "second", "1.3"), *command)
    return folder, command, before, second


def test_the_package_and_its_versions_are_recorded(trained):
    folder, _, before, second = trained
    entry = {"sort": "optimizer", "name": "heavy_ball", "package": "heavy-ball", "version": "1.2"}
    assert before["plugins"] == [entry]
    assert second.returncode == 0, second.stderr
    assert "was trained with heavy-ball 1.2 and is resumed with 1.3" in " ".join(second.stderr.split())
    after = json.loads((folder / "runs" / "tiny" / "run.json").read_text())
    assert after["plugins"] == [{**entry, "version": "1.3"}]


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(each, marks=pytest.mark.long) for each in ("eval", "analyze", "report"))]
)
def test_a_missing_package_is_one_sentence_with_the_next_step(trained, command):
    folder, train, _, _ = trained
    runs = ["--runs-dir", str(folder / "runs")]
    arguments = {
        "train": train,
        "eval": ["eval", "--run", "tiny", "--tasks", "top1", *runs],
        "analyze": ["analyze", "cossim", "--run", "tiny", *runs],
        "report": ["report", "tiny", *runs],
    }[command]
    result = lap(None, *arguments)
    assert result.returncode == 2, result.stderr
    assert "uses the optimizer heavy_ball of the package heavy-ball 1.3, which is not installed" in result.stderr
    assert "pip install heavy-ball" in result.stderr
    assert "Traceback" not in result.stderr
