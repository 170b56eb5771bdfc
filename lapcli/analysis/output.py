"""The output of an analysis: `<what>.json`, `.csv`, `.png` and `.svg` in a folder, and a table for the terminal."""

import csv
import io
from pathlib import Path
from typing import Any

from lapcli.analysis.analyze import Analysis
from lapcli.analysis.drawing import labels, save_figure
from lapcli.analysis.measurement import LayerResult
from lapcli.runtime.files import write_checked_json, write_text
from lapcli.runtime.tables import fitted, wrapped


def write(analysis: Analysis, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    write_checked_json(folder / f"{analysis.what}.json", analysis.to_dict())
    write_text(folder / f"{analysis.what}.csv", to_csv(analysis))
    return [folder / f"{analysis.what}.json", folder / f"{analysis.what}.csv", *save_figure(analysis, folder)]


def to_csv(analysis: Analysis) -> str:
    """One number in each line: `index` is the rank or the head of a series, or the point of a scatter plot."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "weights", "laplacian_heads", "layer", "quantity", "index", "value"])
    for run, label in zip(analysis.runs, labels(analysis.runs), strict=True):
        for layer, result in run.layers.items():
            for quantity, index, value in _numbers(result):
                rows.writerow([run.model.name, run.model.weights, label, layer, quantity, index, value])
    return text.getvalue()


def _numbers(result: LayerResult) -> list[tuple[str, Any, Any]]:
    """None is an empty field, never 0."""
    numbers: list[tuple[str, Any, Any]] = [(k, "", "" if v is None else repr(v)) for k, v in result.values.items()]
    for name, values in result.series.items():
        numbers += [(name, n, repr(value) if value == value else "") for n, value in enumerate(values.tolist())]
    for name, values in result.points.items():
        flat = values.reshape(len(values), -1)
        for column in range(flat.shape[1]):
            quantity = name if flat.shape[1] == 1 else f"{name}_{column}"
            numbers += [(quantity, index, value) for index, value in enumerate(flat[:, column].tolist())]
    return numbers


def to_table(analysis: Analysis) -> str:
    """One row for each layer of each run."""
    first = next(iter(analysis.runs[0].layers.values()))
    columns = analysis.measurement.shown_columns(first.values)
    rows = [["run", "laplacian", "layer", *columns.values()]]
    for run, label in zip(analysis.runs, labels(analysis.runs), strict=True):
        for layer, result in run.layers.items():
            rows.append([run.model.name, label, str(layer), *(_shown(result.values.get(name)) for name in columns)])
    return "\n".join(fitted(rows, right=range(2, len(rows[0]))))


def to_text(analysis: Analysis, paths: list[Path]) -> str:
    told = analysis.to_dict()
    run = analysis.runs[0]
    settings = ", ".join(f"{name} {value}" for name, value in told["settings"].items() if value not in (None, [], ""))
    measured = f"{run.sequences:,} sequences, {run.tokens:,} tokens of the {run.split} split of {run.data}"
    lines = [
        *wrapped(f"{analysis.what}: {told['definition']}", indent="  "),
        *wrapped(f"({settings}; {measured})", indent="  "),
        "",
        to_table(analysis),
        *(line for note in analysis.notes() for line in wrapped(note, "note: ", indent="  ")),
        *wrapped(f"kept in {paths[0].parent}: {', '.join(path.name for path in paths)}", indent="  "),
    ]
    return "\n".join(lines)


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
