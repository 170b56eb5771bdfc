"""Mirrors of runs in trackers. `metrics.jsonl` stays the truth: a mirror is made from it, afterwards or beside it."""
