"""What the figures of the analyses share: colours, markers, labels of runs, empty panels.

Runs are labelled by their number of Laplacian heads (`3L`) and ordered by it. Colours are steps of one scale that is
monotonic in brightness, and lines differ in their markers too: they can be told apart in print and by the colour-blind.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from lapcli.analysis.analyze import Measured

MARKERS = "osD^vP*Xph"
LINES = ("-", "--", "-.", ":")
#: Okabe and Ito's colours, for classes and shares, which have no order.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000", "#999999", "#7F3C8D")


def labels(runs: Sequence["Measured"]) -> list[str]:
    """`3L`, with the name where two runs would read the same."""
    plain = []
    for run in runs:
        counts = run.plan.per_layer
        text = f"{counts[0]}L" if len(set(counts)) == 1 else f"{run.plan.total / len(counts):.1f}L on average"
        plain.append(text if run.subject.weights != "untrained" else f"{text}, untrained")
    return [
        text if plain.count(text) == 1 else f"{text} ({run.subject.name})"
        for text, run in zip(plain, runs, strict=True)
    ]


def legend_title(runs: Sequence["Measured"]) -> str:
    heads = {run.plan.heads for run in runs}
    return f"Laplacian heads\n(of {heads.pop()} in a layer)" if len(heads) == 1 else "Laplacian heads in a layer"


def styles(runs: Sequence["Measured"]) -> list[dict[str, Any]]:
    trained = [run for run in runs if run.subject.weights != "untrained"]
    steps = np.linspace(0.0, 0.82, max(len(trained), 2))
    styles: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        if run.subject.weights == "untrained":
            styles.append({"color": "#888888", "linestyle": LINES[index % 3 + 1], "marker": MARKERS[index % 10]})
        else:
            place = steps[trained.index(run)]
            styles.append({"color": mpl.colormaps["viridis"](place), "linestyle": "-", "marker": MARKERS[index % 10]})
    return styles


def number_or_nan(value: float | int | None) -> float:
    return float("nan") if value is None else float(value)


def panels_of(columns: int, rows: int = 1, width: float = 3.6, height: float = 2.9) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)
