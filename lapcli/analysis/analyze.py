"""Runs measurements on subjects: one pass of each model feeds all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lapcli.analysis.capture import Capture
from lapcli.analysis.catalogue import CATALOGUE, fitting
from lapcli.analysis.found import Found
from lapcli.analysis.measure import DoesNotFit, Settings, attach
from lapcli.analysis.subjects import Subject, say, weights_note
from lapcli.heads.plan import HeadPlan
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import shown_progress


@dataclass(frozen=True)
class Measured:
    """One measurement of one model."""

    subject: Subject
    plan: HeadPlan
    layers: dict[int, Found]
    sequences: int
    tokens: int  # that went through the model
    data: str
    data_sha256: str
    split: str
    class_names: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "name": subject.name,
            "laplacian_heads": list(self.plan.per_layer),
            "heads": self.plan.heads,
            "weights": subject.weights,
            "step": subject.step,
            "weights_sha256": subject.weights_sha256,
            "data": self.data,
            "data_sha256": self.data_sha256,
            "split": self.split,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "layers": [
                {
                    "layer": layer,
                    **found.values,
                    **{name: [_known(value) for value in values.tolist()] for name, values in found.series.items()},
                    "notes": found.notes,
                }
                for layer, found in self.layers.items()
            ],
        }


@dataclass
class Analysis:
    """One measurement of all models that are compared."""

    what: str
    settings: Settings
    runs: list[Measured] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        entry = CATALOGUE[self.what]
        told = {name: _plain(getattr(self.settings, name)) for name in entry.options if name != "norm"}
        if "layer" in told:
            told["layer"] = told["layer"] or entry.layers
        if entry.norm is not None:
            told["norm"] = self.settings.norm_of(self.what)
        return {
            "what": self.what,
            "definition": entry.definition,
            "settings": {**told, "seed": self.settings.seed},
            "runs": [measured.to_dict() for measured in self.runs],
        }

    def notes(self) -> list[str]:
        """Each once, with where it was seen."""
        seen: dict[str, list[str]] = {}
        for run in self.runs:
            for layer, found in run.layers.items():
                for note in found.notes:
                    seen.setdefault(note, []).append(f"{run.subject.name} layer {layer}")
        return [f"{note} ({places[0]}{' and others' if len(places) > 1 else ''})" for note, places in seen.items()]


def analyze(what: Sequence[str] | None, subjects: Sequence[Subject], settings: Settings) -> list[Analysis]:
    """`what`: names of the catalogue; None: everything that fits all of the subjects."""
    fits = [name for name in CATALOGUE if all(name in fitting(subject.kind) for subject in subjects)]
    names = list(what) if what is not None else fits
    for name in names:
        if name not in fits:
            kinds = " and ".join(sorted({subject.kind for subject in subjects}))
            raise UsageError(f"{name} is not for models of {kinds}; these are: {', '.join(fits)}")
    analyses = {name: Analysis(name, settings) for name in names}
    for subject in subjects:
        say(weights_note(subject))
        for name, measured in _measure(names, subject, settings, skip=what is None).items():
            analyses[name].runs.append(measured)
    for analysis in analyses.values():
        analysis.runs.sort(key=lambda run: (run.subject.weights == "untrained", run.plan.total / run.plan.heads))
    return [analysis for analysis in analyses.values() if analysis.runs]


def _measure(names: Sequence[str], subject: Subject, settings: Settings, skip: bool) -> dict[str, Measured]:
    """`skip`: leave out what does not fit this model on this data, and say so."""
    opened = subject.open()
    examples = opened.examples
    capture = Capture(opened.anatomy, subject.name)
    results = {}
    for name in names:
        try:
            results[name] = attach(name, capture, opened, settings)
        except DoesNotFit as error:
            if not skip:
                raise
            say(f"left out: {error}")
    with shown_progress() as progress:
        capture.run(examples.batches(), lambda done: progress(f"analysing {subject.name}", done, len(examples)))
    origin = examples.origin
    return {
        name: Measured(
            subject,
            opened.plan,
            result(),
            capture.sequences,
            capture.tokens,
            origin.description,
            origin.sha256,
            origin.split,
            examples.classes,
        )
        for name, result in results.items()
    }


def _known(value: float) -> float | None:
    """JSON has no "not a number"."""
    return value if value == value else None


def _plain(value: Any) -> Any:
    return [str(item) for item in value] if isinstance(value, tuple) else value
