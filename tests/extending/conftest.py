"""A package from outside, installed where only these tests look."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support import lap, run_process

RECIPE = """
objective: masked_autoencoder
model: {layers: 2, width: 24, heads: 3, laplacian_heads: 1, image: 8, patch: 2}
data: {train: builtin, validation: 0.2, workers: 0}
train: {steps: 6, batch: 32, micro_batch: 32, threads: 1}
optimizer: {lr: 1e-3}
validation: {every: 3}
checkpoint: {every: 2, keep: 5}
"""


@pytest.fixture(scope="session")
def packages(tmp_path_factory) -> Path:
    """The folder that `pip install` puts the package into."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # a copy: building leaves folders beside the sources
    shutil.copytree(Path(__file__).parent / "package", source)
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(folder / "packages")]
    done = run_process([sys.executable, "-m", "pip", "install", *options, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "packages"


@pytest.fixture(scope="session")
def extended(packages, shared_cache, tmp_path_factory):
    """`lap` in a process with the package on its path, with a run folder shared by these tests."""
    runs = tmp_path_factory.mktemp("extended-runs")
    (runs / "painter.yaml").write_text(RECIPE)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])

    def run(*arguments: str, code: int = 0, **options):
        environment = {"PYTHONPATH": path, "LAP_RUNS": str(runs), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
        result = lap(*arguments, cache=shared_cache, environment=environment, **options)
        assert result.returncode == code, result.stderr
        return result

    run.runs, run.recipe, run.path = runs, str(runs / "painter.yaml"), path
    return run
