"""The files of the benchmarks: from the hub, or in a local folder in any of the forms in which people have them.

`--data DIR` is a folder with the benchmarks' folders in it (`DIR/arc`, `DIR/mmlu` ...), or one of these. In each of
them the first form that is there is read; a benchmark that is not there is an error, never another source.
"""

import os
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lapcli.data.hub import cached_hub_files, hub_files
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError

_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True)
class Benchmark:
    repository: str  # on the hub
    hub: Mapping[str, str]  # split: its file there
    folders: Sequence[str]  # names of its folder within DIR, the usual one first
    local: Mapping[str, Sequence[str]] = field(default_factory=dict)  # split: files in that folder, any of these forms


def _arc(name: str) -> Benchmark:
    snake = name.lower().replace("-", "_")
    forms = {}
    for split, official in (("test", "Test"), ("train", "Train"), ("validation", "Dev")):
        forms[split] = (
            f"{name}/{name}-{official}.jsonl",
            f"{name}/{split}-*.parquet",
            f"hf/{name}/{split}-*.parquet",
            *(f"{place}.{end}" for place in (f"{name}/{split}", f"{snake}_{split}") for end in ("jsonl", "parquet")),
        )
    hub = {split: f"{name}/{split}-00000-of-00001.parquet" for split in forms}
    return Benchmark("allenai/ai2_arc", hub, ("arc", "ai2_arc", "allenai/ai2_arc"), forms)


def _plain(split: str, name: str) -> tuple[str, ...]:
    ends = ("jsonl", "jsonl.gz", "parquet", "csv")
    return tuple(f"{place}.{end}" for place in (split, f"{name}_{split}") for end in ends)


BENCHMARKS: dict[str, Benchmark] = {
    "arc_easy": _arc("ARC-Easy"),
    "arc_challenge": _arc("ARC-Challenge"),
    "mmlu": Benchmark(
        "cais/mmlu",
        {split: f"all/{split}-00000-of-00001.parquet" for split in ("test", "dev")},
        ("mmlu", "cais/mmlu"),
        {
            split: (
                f"{split}/*_{split}.csv",
                f"all/{split}-*.parquet",
                f"hf/all/{split}-*.parquet",
                *_plain(split, "mmlu"),
            )
            for split in ("test", "dev")
        },
    ),
    "gsm8k": Benchmark(
        "openai/gsm8k",
        {split: f"main/{split}-00000-of-00001.parquet" for split in ("test", "train")},
        ("gsm8k", "openai/gsm8k"),
        {split: (*_plain(split, "gsm8k"), f"main/{split}-*.parquet") for split in ("test", "train")},
    ),
    "humaneval": Benchmark(
        "openai/openai_humaneval",
        {"test": "openai_humaneval/test-00000-of-00001.parquet"},
        ("humaneval", "openai_humaneval", "openai/openai_humaneval"),
        {
            "test": (
                "HumanEval.jsonl.gz",
                "HumanEval.jsonl",
                "openai_humaneval/test-*.parquet",
                *_plain("test", "humaneval"),
            )
        },
    ),
}


def benchmark_files(task: str, split: str, data: Path | None) -> list[Path]:
    """On this machine by now, in the order in which they are read."""
    benchmark = BENCHMARKS[task]
    if data is None:
        return _from_hub(task, benchmark, split)
    if not data.is_dir():
        raise DataError(f"--data {data} is no folder; it holds the benchmarks' folders, such as {benchmark.folders[0]}")
    folders = [data / name for name in benchmark.folders] + [data]
    for folder in folders:
        for form in benchmark.local[split]:
            if found := sorted(path for path in folder.glob(form) if path.is_file()):
                return found
    usual = data if data.name in benchmark.folders else data / benchmark.folders[0]
    forms = benchmark.local[split]
    raise DataError(
        f"{task}: there is no {split} file in {data}; expected {usual / forms[0]}, or {', '.join(forms[1:4])} beside it"
    )


def _from_hub(task: str, benchmark: Benchmark, split: str) -> list[Path]:
    name = benchmark.hub[split]
    if found := cached_hub_files(benchmark.repository, [name], None):
        return found
    problem = "HF_HUB_OFFLINE is set" if hub_is_offline() else unreachable()
    if problem is None:
        try:
            return hub_files(benchmark.repository, [name], None)
        except DataError as error:
            problem = str(error.__cause__ or error).splitlines()[0][:200]
    raise DataError(
        f"{task}: {name} of the hub's {benchmark.repository} is not on this machine and cannot be downloaded "
        f"({problem}); put {benchmark.local[split][0]} into DIR/{benchmark.folders[0]} and use --data DIR, or get it "
        f"where there is a network with `hf download --repo-type dataset {benchmark.repository} {name}`"
    )


def unreachable() -> str | None:
    """Why the hub certainly cannot be reached, found out at once: its library would try for half a minute."""
    if any(os.environ.get(name) for name in _PROXIES):
        return None
    address = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=0.5).close()
    except TimeoutError:  # slow is not unreachable
        return None
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error.strerror or error}"
    return None
