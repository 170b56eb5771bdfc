"""Mirrors runs in trackers. `metrics.jsonl` is the source: a mirror is made from it, during training or afterwards."""
