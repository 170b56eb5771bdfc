"""Every number is a row of `results.jsonl` in its run's folder, and `results` reads them all into one frame.

A row has its unit, direction and conditions with it, so that no reader has to guess them from a name:

    run, seed            whose number it is
    task, metric         what was measured: `mmlu`, `acc`; `validation`, `bits_per_byte`; `spectrum`, `k_0.99`
    layer                of an analysis; None: of the model
    value, unit          unit: fraction, nats, bits, points, bytes ...; None: a plain number
    direction            `higher` or `lower` is better; None: neither
    stderr, n            standard error, and examples
    limit, split, protocol, conditions
                         how it was measured; `conditions` are further settings that differ from the default, by name
    step, weights_sha256 of the checkpoint
    data, data_sha256    in words, and its identity
    time, seconds        when, and how long it took
    versions, command

Rows are only added. A measurement that is repeated under the same conditions on the same weights replaces the earlier
one in the frame; a row with any other condition is another number, and the two are never averaged.
"""

import fnmatch
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lapcli.runs import INFO, Run, now, read_run, runs_in, unknown_run, versions
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.files import append

if TYPE_CHECKING:
    from pandas import DataFrame

RESULTS = "results.jsonl"
_ASIDE = re.compile(r".*\.old-\d+")  # runs that `--fresh` moved aside
Direction = Literal["higher", "lower"]
#: Columns that must agree for two rows to be the same measurement.
IDENTITY = (
    *("run", "task", "metric", "layer", "limit", "split", "protocol", "conditions"),
    *("step", "weights_sha256", "data_sha256"),
)
COLUMNS = (
    *("run", "seed", "task", "metric", "layer", "value", "unit", "direction", "stderr", "n"),
    *("limit", "split", "protocol", "conditions", "step", "weights_sha256", "data", "data_sha256"),
    *("time", "seconds", "versions", "command"),
)


def row(
    task: str,
    metric: str,
    value: float | None,
    *,
    unit: str | None = None,
    direction: Direction | None = None,
    conditions: Mapping[str, Any] | None = None,
    **known: Any,
) -> dict[str, Any]:
    """Return a row; `known` are further columns."""
    if unknown := set(known) - set(COLUMNS):
        raise TypeError(f"a row of results has no {', '.join(sorted(unknown))}")
    shown = {key: str(value) for key, value in sorted((conditions or {}).items())}
    return {
        "task": task,
        "metric": metric,
        "value": value,
        "unit": unit,
        "direction": direction,
        "conditions": ", ".join(f"{key} {value}" for key, value in shown.items()),
        **known,
    }


def add_rows(run: Run, rows: Iterable[dict[str, Any]]) -> None:
    """Append rows to the run's table, with facts about this process."""
    same = {"run": run.name, "seed": run.recipe.seed}
    here = {"time": now(), "versions": versions(), "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}
    lines = [json.dumps({**same, **each, **here}) + "\n" for each in rows]
    append(run.path / RESULTS, "".join(lines).encode())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the intact rows of a run's folder; a line truncated by a kill is skipped."""
    try:
        lines = (path / RESULTS).read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [each for each in rows if isinstance(each, dict) and "task" in each]


def find_paths(names: Sequence[str], runs_dir: Path) -> list[Path]:
    """Return the folders of the runs given by name, folder or pattern; by default of all runs."""
    if not names:
        return [path for path in runs_in(runs_dir) if not _ASIDE.fullmatch(path.name)]
    paths: dict[Path, None] = {}
    for name in names:
        direct = Path(name) if (Path(name) / INFO).is_file() else runs_dir / name
        if (direct / INFO).is_file():
            matching = [direct]
        elif Path(name).is_dir() and runs_in(Path(name)):
            matching = [path for path in runs_in(Path(name)) if not _ASIDE.fullmatch(path.name)]
        else:
            matching = [path for path in runs_in(runs_dir) if fnmatch.fnmatchcase(path.name, name)]
        if not matching:
            raise unknown_run(runs_dir, name)
        paths.update(dict.fromkeys(matching))
    return list(paths)


def results(runs: Sequence[str | Path] | str | Path = (), runs_dir: Path | None = None) -> "DataFrame":
    """Read the results of runs by name, folder or pattern; by default of all runs.

    One row per number, in the columns above, and `checkpoint`: `last` and `best` for the weights that a finished run
    ended with and its best ones, else the step.
    """
    import pandas

    names = [runs] if isinstance(runs, str | Path) else runs
    rows = []
    for path in find_paths([str(name) for name in names], runs_dir or default_runs_dir()):
        run = read_run(path)
        best = run.info.get("best_step")
        for each in read_rows(path):
            # The folder's name, not the recorded one: a run may have been renamed.
            which = "last" if each.get("weights_sha256") == run.info.get("weights_sha256") else str(each.get("step"))
            is_best = best is not None and each.get("step") == best
            rows.append({**each, "run": run.name, "checkpoint": which, "is_best": is_best})
    frame = pandas.DataFrame(rows, columns=[*COLUMNS, "checkpoint", "is_best"])
    return frame.drop_duplicates(list(IDENTITY), keep="last", ignore_index=True)
