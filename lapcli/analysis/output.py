"""What an analysis leaves: `<what>.json`, `.csv`, `.png` and `.svg` in a folder, and a table for the terminal."""

import csv
import io
from pathlib import Path
from typing import Any

from lapcli.analysis.analyze import Analysis
from lapcli.analysis.figure_parts import labels
from lapcli.analysis.figures import draw
from lapcli.analysis.found import Found
from lapcli.runtime.files import write_json, write_text

#: Columns of the terminal's table; the files have everything.
COLUMNS: dict[str, list[str]] = {
    "spectrum": ["k_0.9", "k_0.99", "k_0.999", "variance"],
    "anova": ["between_class_share", "within_class_share", "within_sequence_share", "classes", "classes_left_out"],
    "cossim": ["cosine_similarity", "cosine_similarity_std"],
    "snr": ["snr", "snr_std"],
    "collapse": [
        "nc1",
        *(f"nc2_{what}_{of}" for of in ("centred", "as_printed", "classifier") for what in ("equinorm", "equiangular")),
        "nc3",
        "nc4",
    ],
    "simplex": ["tokens_shown", "nearest_corner_share"],
    "pca": ["tokens_shown", "variance_share_1", "variance_share_2"],
    "updates": [
        f"{kind}_{name}"
        for name in ("cosine_with_mean", "cosine_towards_mean", "variance_change")
        for kind in ("attention", "laplacian")
    ],
    "features": ["pictures", "patches", "variance_share_1", "variance_share_2", "variance_share_3"],
}
SHORT = {
    "_class_share_by_example": " by token",
    "between_class_share": "between",
    "within_class_share": "within class",
    "within_sequence_share": "within sequence",
    "classes_left_out": "left out",
    "nc2_equinorm_": "norm ",
    "nc2_equiangular_": "angle ",
    "as_printed": "printed",
    "classifier": "W",
    "attention_": "A ",
    "laplacian_": "L ",
    "cosine_with_mean": "along",
    "cosine_towards_mean": "towards",
    "variance_change": "variance",
    "variance_share_": "share ",
}
BY_EXAMPLE = ["between_class_share_by_example", "within_class_share_by_example"]


def write(analysis: Analysis, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{analysis.what}.json", analysis.to_dict())
    write_text(folder / f"{analysis.what}.csv", to_csv(analysis))
    return [folder / f"{analysis.what}.json", folder / f"{analysis.what}.csv", *draw(analysis, folder)]


def to_csv(analysis: Analysis) -> str:
    """One number a line: `index` is the rank or the head of a series, or the point of a picture."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "weights", "laplacian_heads", "layer", "quantity", "index", "value"])
    for run, label in zip(analysis.runs, labels(analysis.runs), strict=True):
        for layer, found in run.layers.items():
            for quantity, index, value in _numbers(found):
                rows.writerow([run.subject.name, run.subject.weights, label, layer, quantity, index, value])
    return text.getvalue()


def _numbers(found: Found) -> list[tuple[str, Any, Any]]:
    """None is an empty field, never 0."""
    numbers: list[tuple[str, Any, Any]] = [(k, "", "" if v is None else repr(v)) for k, v in found.values.items()]
    for name, values in found.series.items():
        numbers += [(name, n, repr(value) if value == value else "") for n, value in enumerate(values.tolist())]
    for name, values in found.points.items():
        flat = values.reshape(len(values), -1)
        for column in range(flat.shape[1]):
            quantity = name if flat.shape[1] == 1 else f"{name}_{column}"
            numbers += [(quantity, index, value) for index, value in enumerate(flat[:, column].tolist())]
    return numbers


def to_table(analysis: Analysis) -> str:
    """Runs by layers; a long list of layers is cut to its ends."""
    first = next(iter(analysis.runs[0].layers.values()))
    columns = [name for name in COLUMNS[analysis.what] if name in first.values]
    if analysis.what == "anova" and "within_sequence_share" not in first.values:
        columns = [*columns[:2], *BY_EXAMPLE, *columns[2:]]
    rows = [["run", "laplacian", "layer", *(_heading(name) for name in columns)]]
    for run, label in zip(analysis.runs, labels(analysis.runs), strict=True):
        for layer, found in run.layers.items():
            rows.append([run.subject.name, label, str(layer), *(_shown(found.values.get(name)) for name in columns)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def _heading(name: str) -> str:
    """Short enough that a table fits a terminal; the files have the full names."""
    for long, short in SHORT.items():
        name = name.replace(long, short)
    return name.replace("_", " ").strip()


def to_text(analysis: Analysis, paths: list[Path]) -> str:
    told = analysis.to_dict()
    run = analysis.runs[0]
    settings = ", ".join(f"{name} {value}" for name, value in told["settings"].items() if value not in (None, [], ""))
    lines = [
        f"{analysis.what}: {told['definition']}",
        f"({settings}; {run.sequences:,} sequences, {run.tokens:,} tokens of the {run.split} split of {run.data})",
        "",
        to_table(analysis),
        *(f"note: {note}" for note in analysis.notes()),
        f"kept in {paths[0].parent}: {', '.join(path.name for path in paths)}",
    ]
    return "\n".join(lines)


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
