"""Cost of a sample of generated code: the canonical solutions of HumanEval against an empty Python process.

A sample is two interpreters, each in its own sandbox, from start to verdict, including the tests' own time.
A bare `python -I -S -c pass` takes turns with the samples. Without the real problems (LAP_TEST_DATA) a small
problem is used.
"""

import gzip
import json
import os
import statistics
import subprocess
import time
from pathlib import Path

from lapcli.runtime.environment import usable_cores
from lapcli.sandbox import Candidate, Mode, run_all, run_candidate
from lapcli.sandbox.command import executable
from lapcli.sandbox.run import probe

TARGET = 12.0
SMALL = Candidate(
    "from typing import List\n",
    "from typing import List\ndef biggest(xs: List[int]) -> int:\n    return max(xs)\n",
    "def check(candidate):\n    for n in range(1, 8):\n        assert candidate(list(range(n))) == n - 1\n",
    "biggest",
)


def main() -> None:
    samples, name = problems()
    print(f"{len(samples)} samples ({name}), one after the other; bare: {executable()} -I -S -c pass")
    for mode in (Mode.BUBBLEWRAP, Mode.LANDLOCK):
        problem = probe(mode)
        if problem is not None:
            print(f"  {mode:<18} not measured: {problem}")
            continue
        bare, whole = [], []
        for sample in samples:
            bare.append(bare_start())
            verdict = run_candidate(sample, mode)
            assert verdict.passed, verdict.reason
            whole.append(verdict.seconds)
        ratio = statistics.median(whole) / statistics.median(bare)
        began = time.perf_counter()
        workers = usable_cores()
        assert all(verdict.passed for verdict in run_all(samples, mode, workers))
        rate = len(samples) / (time.perf_counter() - began)
        print(f"  {mode:<18}{1000 * statistics.median(whole):>5.0f} ms, times bare {ratio:>5.2f}   target <= {TARGET}  "
              f" (bare {1000 * statistics.median(bare):.0f} ms; {workers} workers: {rate:.1f} samples/s)")  # fmt: skip


def problems() -> tuple[list[Candidate], str]:
    path = Path(os.environ.get("LAP_TEST_DATA", "")) / "humaneval" / "HumanEval.jsonl.gz"
    if not path.exists():
        return [SMALL] * 30, "a small problem; LAP_TEST_DATA names no folder of real ones"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [
        Candidate(row["prompt"], row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"])
        for row in rows
    ], "HumanEval's canonical solutions"


def bare_start() -> float:
    began = time.perf_counter()
    subprocess.run([executable(), "-I", "-S", "-c", "pass"], check=True, env={})
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
