"""Runs measurements on models, with one pass of each model for all of them, and writes the results.

An analysis becomes `<what>.json`, `.png` and `.svg` in a folder, and a table for the terminal.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lapcli.analysis.analyzed_models import AnalyzedModel
from lapcli.analysis.drawing import labels, save_figure
from lapcli.analysis.examples import DataOrigin
from lapcli.analysis.measurement import LayerResult, Measurement, NotApplicable, Settings
from lapcli.analysis.measurements import MEASUREMENTS, check_fits, measurements_for
from lapcli.heads.plan import HeadPlan
from lapcli.measures.capture import Capture
from lapcli.result_rows import add_rows, row
from lapcli.runs import read_run
from lapcli.runtime.files import write_json
from lapcli.runtime.progress import shown_progress
from lapcli.runtime.tables import fitted, wrapped


@dataclass(frozen=True)
class ModelResult:
    """One measurement of one model."""

    model: AnalyzedModel
    plan: HeadPlan
    layers: dict[int, LayerResult]
    sequences: int
    tokens: int  # that went through the model
    origin: DataOrigin
    class_names: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        model = self.model
        return {
            "name": model.name,
            "laplacian_heads": list(self.plan.per_layer),
            **({} if self.plan.is_laplacian else {"operators": str(self.plan)}),
            "heads": self.plan.heads,
            "weights": model.weights,
            "step": model.step,
            "weights_sha256": model.weights_sha256,
            **asdict(self.origin),
            "sequences": self.sequences,
            "tokens": self.tokens,
            "layers": [
                {
                    "layer": layer,
                    **result.values,
                    **{name: [_none_if_nan(v) for v in values.tolist()] for name, values in result.series.items()},
                    **{name: values.tolist() for name, values in result.points.items()},
                    **result.words,
                }
                for layer, result in self.layers.items()
            ],
        }


@dataclass
class Analysis:
    """One measurement of all models that are compared."""

    measurement: type[Measurement]
    settings: Settings
    runs: list[ModelResult] = field(default_factory=list)

    @property
    def what(self) -> str:
        return self.measurement.name

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "definition": self.measurement.definition,
            "settings": self.measurement.described_settings(self.settings),
            "runs": [run.to_dict() for run in self.runs],
        }


def analyze(what: Sequence[str] | None, models: Sequence[AnalyzedModel], settings: Settings) -> list[Analysis]:
    """Measure all models. `what`: names of measurements; None: all that apply to every model."""
    names = what or measurements_for(frozenset.intersection(*(model.gives for model in models)))
    check_fits(names, [(model.objective, model.gives) for model in models])
    analyses = {name: Analysis(MEASUREMENTS[name], settings) for name in names}
    for model in models:
        step = "" if model.step is None else f", step {model.step}"
        sha256 = "" if model.weights_sha256 is None else f", sha256 {model.weights_sha256}"
        print(f"{model.path or model.name}: {model.weights} weights{step}{sha256}", file=sys.stderr, flush=True)
        for name, result in _measure(names, model, settings, skip=what is None).items():
            analyses[name].runs.append(result)
    for analysis in analyses.values():
        analysis.runs.sort(key=lambda run: (run.model.weights == "untrained", run.plan.total / run.plan.heads))
    return [analysis for analysis in analyses.values() if analysis.runs]


def _measure(names: Sequence[str], model: AnalyzedModel, settings: Settings, skip: bool) -> dict[str, ModelResult]:
    """Measure one model in one pass. `skip`: omit measurements that do not apply to this model and data."""
    opened = model.open()
    examples = opened.examples
    capture = Capture(opened.anatomy, model.name)
    measured = {}
    for name in names:
        try:
            measurement = MEASUREMENTS[name](opened, settings)
        except NotApplicable as error:
            if not skip:
                raise
            print(f"left out: {error}", file=sys.stderr, flush=True)
            continue
        measured[name] = {layer: measurement.measure(capture, layer) for layer in measurement.layers}
    if any(MEASUREMENTS[name].reads_tokens for name in measured):
        with shown_progress() as progress:
            capture.run(examples.batches(), lambda done: progress(f"analysing {model.name}", done, len(examples)))
    return {
        name: ModelResult(
            model,
            opened.plan,
            {layer: result() for layer, result in by_layer.items()},
            capture.sequences,
            capture.tokens,
            examples.origin,
            examples.classes,
        )
        for name, by_layer in measured.items()
    }


def _none_if_nan(value: float) -> float | None:
    """Replace NaN, which JSON does not have."""
    return value if value == value else None


def write_analysis(analysis: Analysis, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{analysis.what}.json", analysis.to_dict())
    for measured in analysis.runs:
        if measured.model.path is not None and measured.model.weights == "trained":
            add_rows(read_run(measured.model.path), _rows(analysis, measured))
    return [folder / f"{analysis.what}.json", *save_figure(analysis, folder)]


def _rows(analysis: Analysis, measured: ModelResult) -> list[dict[str, Any]]:
    """Return the values of all layers as rows of results; series and points stay in the files of the analysis."""
    known: dict[str, Any] = {
        "n": measured.sequences,
        "limit": analysis.settings.limit,
        "step": measured.model.step,
        "weights_sha256": measured.model.weights_sha256,
        **asdict(measured.origin),
    }
    return [
        row(analysis.what, name, value, layer=layer, **known)
        for layer, result in measured.layers.items()
        for name, value in result.values.items()
        if name not in analysis.measurement.counts
    ]


def to_table(analysis: Analysis) -> str:
    """Format a table with one row for each layer of each run."""
    # Keys of all layers: an operator's heads, for example, may occur only in some.
    values = {
        name: value for run in analysis.runs for each in run.layers.values() for name, value in each.values.items()
    }
    columns = analysis.measurement.shown_columns(values)
    rows = [["run", "laplacian", "layer", *columns.values()]]
    for run, label in zip(analysis.runs, labels(analysis.runs), strict=True):
        for layer, result in run.layers.items():
            rows.append([run.model.name, label, str(layer), *(_shown(result.values.get(name)) for name in columns)])
    return "\n".join(fitted(rows, right=range(2, len(rows[0]))))


def to_text(analysis: Analysis, paths: list[Path]) -> str:
    record = analysis.to_dict()
    run = analysis.runs[0]
    settings = ", ".join(f"{name} {value}" for name, value in record["settings"].items() if value not in (None, [], ""))
    measured = (
        f"{run.sequences:,} sequences, {run.tokens:,} tokens of the {run.origin.split} split of {run.origin.data}"
    )
    lines = [
        *wrapped(f"{analysis.what}: {record['definition']}", indent="  "),
        *wrapped(f"({settings}; {measured})", indent="  "),
        "",
        to_table(analysis),
        *wrapped(f"written to {paths[0].parent}: {', '.join(path.name for path in paths)}", indent="  "),
    ]
    return "\n".join(lines)


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
