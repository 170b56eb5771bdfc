"""The quickstarts at full length: their claims hold."""

import json
import statistics

import pytest
from support import lap

from lapcli.evaluation.tasks import wilson_interval

pytestmark = pytest.mark.long

HELD_OUT_PIECES = 442


@pytest.mark.parametrize("heads", [0, 2, 4])
def test_the_quickstart_learns(heads, tmp_path, shared_cache):
    """No claim about which head count is better at this size: bits per byte fall by at least 40%."""
    words = ["recipes/quickstart.yaml", "--set", f"model.laplacian_heads={heads}", "--runs-dir", str(tmp_path)]
    result = lap("train", *words, cache=shared_cache, timeout=1800)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    start, end = (summary[when]["validation_bits_per_byte"] for when in ("start", "end"))
    assert end <= 0.6 * start


def test_the_digits_recipe_learns(tmp_path, shared_cache):
    result = lap("train", "recipes/vit_digits.yaml", "--runs-dir", str(tmp_path), cache=shared_cache, timeout=1800)
    assert result.returncode == 0, result.stderr
    result = lap("eval", "--runs-dir", str(tmp_path), "--tasks", "top1,top5", "--json", cache=shared_cache)
    assert result.returncode == 0, result.stderr
    tasks = json.loads(result.stdout)["tasks"]
    assert tasks["top1"]["count"] == 359
    assert tasks["top1"]["value"] >= 0.95
    assert tasks["top5"]["value"] >= 0.99


def test_the_self_supervised_quickstart_learns(tmp_path, shared_cache):
    """The loss falls, and the teacher's k-NN on held-out pieces is above that of step 0 by more than its interval."""
    options = ["--name", "dino", "--runs-dir", str(tmp_path)]
    result = lap("train", "recipes/dino_quickstart.yaml", *options, cache=shared_cache, timeout=3600)
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "dino" / "summary.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "dino" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert statistics.mean(losses[-20:]) < statistics.mean(losses[:20])
    start, end = (summary[when]["validation_knn"] for when in ("start", "end"))
    low, high = wilson_interval(round(end * HELD_OUT_PIECES), HELD_OUT_PIECES)
    assert end - start > (high - low) / 2
