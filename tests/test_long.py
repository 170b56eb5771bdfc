"""Full-length recipes and comparisons over seeds: `make long`, outside `make test`."""

import json
import statistics

import pytest
from support import lap

from lapcli.evaluation.tasks import wilson_interval

pytestmark = pytest.mark.long

HELD_OUT_PIECES = 442
CLAIM = 0.6  # of the first validation's bits per byte: the quickstart falls by at least 40%


def bits_per_byte(path):
    summary = json.loads((path / "summary.json").read_text())
    return [summary[when]["validation_bits_per_byte"] for when in ("start", "end")], summary["bigram_bits_per_byte"]


def test_the_whole_quickstart(tmp_path, shared_cache):
    result = lap("train", "recipes/quickstart.yaml", "--runs-dir", str(tmp_path), cache=shared_cache, timeout=1800)
    assert result.returncode == 0, result.stderr
    (start, end), bigram = bits_per_byte(tmp_path / "quickstart")
    assert end <= CLAIM * start
    assert end < bigram


def test_quickstart_by_heads_over_seeds(tmp_path, shared_cache, capsys):
    """No claim about which is better at this size: every head count must learn on every seed; the table is printed."""
    table = {}
    for heads in (0, 2, 4):
        ends = []
        for seed in (0, 1, 2):
            name = f"quickstart-{heads}L-{seed}"
            options = ["--set", f"model.laplacian_heads={heads}", "--seed", str(seed), "--name", name]
            result = lap(
                "train",
                "recipes/quickstart.yaml",
                *options,
                "--runs-dir",
                str(tmp_path),
                cache=shared_cache,
                timeout=1800,
            )
            assert result.returncode == 0, result.stderr
            (start, end), _ = bits_per_byte(tmp_path / name)
            assert end <= CLAIM * start, name
            ends.append(end)
        table[heads] = ends
    with capsys.disabled():
        for heads, ends in table.items():
            mean, std = statistics.mean(ends), statistics.stdev(ends)
            print(f"\n{heads} Laplacian heads: {mean:.4f} +- {std:.4f} bits per byte (n = 3, ddof 1)")


def test_the_whole_self_supervised_quickstart_over_seeds(tmp_path, shared_cache, capsys):
    """The loss falls, and the teacher's k-NN on held-out pieces is above that of step 0 by more than its interval."""
    rows = []
    for seed in (0, 1, 2):
        options = ["--seed", str(seed), "--name", f"dino-{seed}", "--runs-dir", str(tmp_path)]
        result = lap("train", "recipes/dino_quickstart.yaml", *options, cache=shared_cache, timeout=3600)
        assert result.returncode == 0, result.stderr
        summary = json.loads((tmp_path / f"dino-{seed}" / "summary.json").read_text())
        lines = [json.loads(line) for line in (tmp_path / f"dino-{seed}" / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        assert statistics.mean(losses[-20:]) < statistics.mean(losses[:20])
        rows.append([summary[when]["validation_knn"] for when in ("start", "end")])
    with capsys.disabled():
        print("".join(f"\nseed {seed}: k-NN {start:.4f} -> {end:.4f}" for seed, (start, end) in enumerate(rows)))
    for start, end in rows:
        low, high = wilson_interval(round(end * HELD_OUT_PIECES), HELD_OUT_PIECES)
        assert end - start > (high - low) / 2
