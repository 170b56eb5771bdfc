"""One and two processes train on the same batches, save and validate together, and end."""

import pytest
from image_support import image_recipe
from support import lap

from lapcli.recipe import recipe_to_yaml
from lapcli.training.metrics import read_metrics


def test_two_processes_follow_one(tmp_path, shared_cache):
    recipe = image_recipe(model={"drop_path": 0.0}, train={"steps": 6}, checkpoint={"every": None, "keep": 1})
    (tmp_path / "tiny.yaml").write_text(recipe_to_yaml(recipe))
    found = []
    for processes in (1, 2):
        options = ["--name", f"run{processes}", "--runs-dir", str(tmp_path / "runs")]
        result = lap("train", str(tmp_path / "tiny.yaml"), *options, cache=shared_cache, processes=processes)
        assert result.returncode == 0, result.stderr
        found.append(read_metrics(tmp_path / "runs" / f"run{processes}" / "metrics.jsonl"))
    one, two = found
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for key in ("loss", "validation_loss"):
        expected = [line[key] for line in one if key in line]
        assert [line[key] for line in two if key in line] == pytest.approx(expected, rel=1e-4)
