"""The benchmarks of language models, and the registry in which `lap eval` and reports look them up by name."""

from lapcli.evaluation.benchmarks.benchmark import Benchmark
from lapcli.runtime.plugins import Registry

_PLACE = "lapcli.evaluation.benchmarks"
BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    {
        "arc_easy": f"{_PLACE}.choices:ARC_EASY",
        "arc_challenge": f"{_PLACE}.choices:ARC_CHALLENGE",
        "mmlu": f"{_PLACE}.choices:MMLU",
        "gsm8k": f"{_PLACE}.numbers:GSM8K",
        "humaneval": f"{_PLACE}.humaneval:HUMANEVAL",
        "spelling": f"{_PLACE}.numbers:SPELLING",
        "bpb": f"{_PLACE}.bits_per_byte:BITS_PER_BYTE",
    },
)

#: The columns of the paper's table, over which it takes its average.
PAPER_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")

__all__ = ["BENCHMARKS", "PAPER_TASKS", "Benchmark"]
