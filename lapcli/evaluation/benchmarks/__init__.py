"""The benchmarks of language models: a file for each, and the registry that `lap eval` and reports ask by name."""

from lapcli.evaluation.benchmarks.benchmark import Benchmark
from lapcli.runtime.plugins import Registry

BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    {
        "arc_easy": "lapcli.evaluation.benchmarks.arc:ARC_EASY",
        "arc_challenge": "lapcli.evaluation.benchmarks.arc:ARC_CHALLENGE",
        "mmlu": "lapcli.evaluation.benchmarks.mmlu:MMLU",
        "gsm8k": "lapcli.evaluation.benchmarks.gsm8k:GSM8K",
        "humaneval": "lapcli.evaluation.benchmarks.humaneval:HUMANEVAL",
        "spelling": "lapcli.evaluation.benchmarks.spelling:SPELLING",
        "bpb": "lapcli.evaluation.benchmarks.bits_per_byte:BITS_PER_BYTE",
    },
)

#: The columns of the paper's table, over which it takes its average.
PAPER_TASKS = ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval")

__all__ = ["BENCHMARKS", "PAPER_TASKS", "Benchmark"]
