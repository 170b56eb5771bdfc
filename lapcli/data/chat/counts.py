"""How many rows a recipe's mixtures have, before anything is rendered or downloaded."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lapcli.data.chat.prepared import rows_at_hand
from lapcli.data.chat.sources import source_files
from lapcli.recipe.chat import ChatRecipe, DataSet, Stage
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.progress import Progress


@dataclass(frozen=True)
class Count:
    name: str
    rows: int | None  # taken; none: all of a source that is not on this machine
    repeats: int
    available: int | None  # in the source; none: not on this machine

    @property
    def total(self) -> int | None:
        return None if self.rows is None else self.rows * self.repeats


@dataclass(frozen=True)
class StageCounts:
    stage: str
    train: list[Count]
    validation: list[Count]
    batch: int
    unit: str
    steps: int | None  # of padded stages; packed ones are known once the rows are rendered
    learning_rate_scale: float

    @property
    def rows(self) -> int | None:
        return _sum(self.train)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows": self.rows, "validation_rows": _sum(self.validation)}

    def to_text(self) -> str:
        steps = "by tokens, known once rendered" if self.steps is None else f"{self.steps:,}"
        lines = [f"{self.stage}: {self.batch:,} {self.unit} a step, steps: {steps}"]
        lines += _table(self.train, "rows in all")
        if self.validation:
            lines += ["  held out", *_table(self.validation, "rows in all")]
        return "\n".join(lines)


def count_stages(recipe: ChatRecipe) -> list[StageCounts]:
    return [_count_stage(name, stage) for name, stage in recipe.stages.given().items()]


def fetch_data_sets(recipe: ChatRecipe, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Downloads what the mixtures need and is not here; one line a data set."""
    rows: dict[tuple, dict[str, Any]] = {}
    for stage in recipe.stages.given().values():
        for data_set in (*stage.mixture, *stage.validation.mixture):
            key = (data_set.format, data_set.source, str(data_set.files), data_set.revision)
            files = [] if data_set.source in ("builtin", "system") else source_files(data_set, progress) or []
            found = rows_at_hand(data_set) or 0
            before = rows.get(key, {"rows": 0})
            rows[key] = {
                "name": data_set.name,
                "source": data_set.source,
                "rows": max(found, before["rows"]),
                "bytes": sum(path.stat().st_size for path in files),
                "sha256": [sha256_of_file(path) for path in files],
            }
    return list(rows.values())


def _count_stage(name: str, stage: Stage) -> StageCounts:
    train, padded = _counts(stage.mixture), stage.batching == "padded"
    steps, rows = stage.train.steps, _sum(train)
    if steps is None and padded and rows is not None:
        steps = max(1, int((stage.train.epochs or 0) * rows) // stage.train.batch) - stage.drop_last_update
    return StageCounts(
        stage=name,
        train=train,
        validation=_counts(stage.validation.mixture),
        batch=stage.train.batch,
        unit="conversations" if padded else "packed sequences",
        steps=steps,
        learning_rate_scale=stage.optimizer.lr_scale,
    )


def _counts(data_sets: Sequence[DataSet]) -> list[Count]:
    counts = []
    for data_set in data_sets:
        available = rows_at_hand(data_set)
        counts.append(Count(data_set.name, data_set.rows or available, data_set.repeats, available))
    return counts


def _sum(counts: Sequence[Count]) -> int | None:
    totals = [count.total for count in counts]
    return None if None in totals else sum(total for total in totals if total is not None)


def _table(counts: Sequence[Count], last: str) -> list[str]:
    lines = []
    for count in counts:
        rows = "all" if count.rows is None else f"{count.rows:,}"
        rows = rows if count.repeats == 1 else f"{count.repeats} x {rows}"
        there = "not on this machine" if count.available is None else f"of {count.available:,}"
        lines.append(f"  {count.name:<24}{rows:>14}   {there}")
    total = _sum(counts)
    return [*lines, f"  {last:<24}{'unknown' if total is None else f'{total:,}':>14}"]
