"""The whole digits recipe, as a user runs it."""

import json

from support import lap


def test_the_whole_digits_recipe(tmp_path, shared_cache):
    result = lap("train", "recipes/vit_digits.yaml", "--runs-dir", str(tmp_path), cache=shared_cache, timeout=1800)
    assert result.returncode == 0, result.stderr
    result = lap("eval", "--runs-dir", str(tmp_path), "--tasks", "top1,top5", "--json", cache=shared_cache)
    assert result.returncode == 0, result.stderr
    tasks = json.loads(result.stdout)["tasks"]
    assert tasks["top1"]["count"] == 359
    assert tasks["top1"]["value"] >= 0.95
    assert tasks["top5"]["value"] >= 0.99
