"""The benchmarks as a family of tasks, with their options: any model that gives language can be asked.

Names that are not among our benchmarks are lm-eval's; whether it has such a task is looked up in its files, because
importing it and building its index takes half a minute.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lapcli.evaluation.benchmarks import BENCHMARKS, PAPER_TASKS
from lapcli.evaluation.benchmarks.benchmark import SAMPLING, BenchmarkSettings
from lapcli.evaluation.tasks import EvaluationRequest, TaskFamily, TaskResults
from lapcli.recipe.schema import CHAT, LANGUAGE
from lapcli.runtime.errors import UsageError

# Names in a definition: `task: name`, `tag: [a, b]`, or a list of names on lines of their own and comments.
_KEYS = re.compile(
    r"""^["']?(?:task|group|tag)["']?[ \t]*:((?:.*\n[ \t]*(?:-[ \t]+[^\s:]+[ \t]*(?:\#.*)?$|\#.*$))+|.*)""",
    re.MULTILINE,
)
_COMMENT, _NAME = re.compile(r"#.*"), re.compile(r"""[^\s"'\[\],]+""")


class LanguageTasks(TaskFamily):
    needs = frozenset({LANGUAGE})
    measures = "language"
    tasks = BENCHMARKS
    default = PAPER_TASKS
    options = (
        "protocol",
        *SAMPLING,
        "seed",
        "show_prompt",
        "samples_out",
        "unsafe_code_execution",
        "fresh",
    )

    def has(self, name: str) -> bool:
        return name in BENCHMARKS or name in _lm_eval_names() or (bool(name) and Path(name).is_file())

    def near(self) -> Iterable[str]:
        return [*BENCHMARKS, *_lm_eval_names()]

    def check(self, tasks: Sequence[str], options: Mapping[str, Any], data: Path | None, gives: frozenset[str]) -> None:
        settings = read_benchmark_settings(gives, options)
        for name in tasks:
            if name in BENCHMARKS:
                BENCHMARKS[name].check(gives, data)
            elif settings.protocol != "harness":
                raise UsageError(
                    f"--tasks: {name[:60]!r} is not one of the paper's tasks ({', '.join(BENCHMARKS)}); lm-eval's "
                    "other tasks need --protocol harness"
                )
            elif data is not None:
                raise UsageError(f"--data is not for {name}, whose files lm-eval finds itself; leave it out")
        path: Path | None = options.get("samples_out")
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--samples-out {path}: there is no folder {path.parent}; make it first")

    def measure(self, request: EvaluationRequest) -> TaskResults:
        from lapcli.evaluation.harness.run import evaluate

        return evaluate(request, read_benchmark_settings(request.loaded.gives, request.options))


def read_benchmark_settings(gives: frozenset[str], options: Mapping[str, Any]) -> BenchmarkSettings:
    protocol = options.get("protocol", "paper" if CHAT in gives else "harness")
    if protocol not in ("paper", "harness"):
        raise UsageError(f"--protocol takes paper or harness, got {str(protocol)[:40]!r}")
    if protocol == "paper" and CHAT not in gives:
        raise UsageError(
            "--protocol paper asks in chat form, which this run has not learned; use --protocol harness, or the run "
            "of `lap sft`"
        )
    given = {name: options[name] for name in (*SAMPLING, "seed") if name in options}
    unused = [name for name in SAMPLING if name in given]
    if protocol == "harness" and unused:
        raise UsageError(
            f"--{unused[0].replace('_', '-')} has no effect with --protocol harness, whose tasks bring their own "
            "sampling; leave it out, or use --protocol paper"
        )
    settings = BenchmarkSettings(protocol, **given)
    if settings.temperature == 0 and settings.samples > 1:
        raise UsageError(
            f"at --temperature 0 all {settings.samples} samples of a question are the same; use --samples 1, or a "
            "temperature above 0"
        )
    return settings


@cache
def _lm_eval_names() -> frozenset[str]:
    """Read lm-eval's tasks, groups and tags from its 14,000 definitions, in a second or two, without importing it.

    A definition is only searched for its names: parsing all of them, as lm-eval does, takes a quarter of a minute.
    """
    package = find_spec("lm_eval")
    folder = Path(package.origin).parent / "tasks" if package and package.origin else Path()
    texts = []
    for place, _, files in os.walk(folder):
        for file in files:
            if "." not in file or file.endswith((".yaml", ".yml")):  # its templates have no ending
                with open(os.path.join(place, file), "rb") as definition:
                    texts.append(definition.read())
    given = _KEYS.findall(b"\n".join(texts).decode("utf-8", "replace"))
    return frozenset(name for values in given for name in _NAME.findall(_COMMENT.sub("", values))) - {"-", "null"}


LANGUAGE_TASKS = LanguageTasks()
