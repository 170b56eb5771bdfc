"""Attaches measurements to a capture: which tokens of which layers feed which accumulator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from lapcli.analysis.anatomy import check_tokens
from lapcli.analysis.anova import Anova
from lapcli.analysis.capture import Batch, Capture, Site
from lapcli.analysis.catalogue import CATALOGUE
from lapcli.analysis.collapse import Collapse
from lapcli.analysis.cosine import CosineSimilarity
from lapcli.analysis.examples import Examples, ImageExamples
from lapcli.analysis.features import PICTURES, Features
from lapcli.analysis.found import Found
from lapcli.analysis.pca import PCA
from lapcli.analysis.simplex import Simplex
from lapcli.analysis.snr import SignalToNoise
from lapcli.analysis.spectrum import Spectrum
from lapcli.analysis.subjects import Opened
from lapcli.analysis.updates import Updates
from lapcli.runtime.errors import UsageError

SPREAD = 6  # layers of a figure that shows some of them
COLOURED = 10  # classes of a figure that colours them


@dataclass(frozen=True)
class Settings:
    """How to measure; None is the measurement's own default, the paper's reading."""

    layer: str | None = None
    tokens: str = "all"
    norm: str | None = None
    min_count: int = 2
    center: str = "none"
    classes: str | None = None
    images: tuple[Path, ...] = ()
    overlay: bool = False
    seed: int = 0

    def norm_of(self, what: str) -> str | None:
        own = CATALOGUE[what].norm
        return own if own is None or self.norm is None else self.norm


class DoesNotFit(UsageError):
    """A measurement that this model on this data cannot have."""


Results = Callable[[], dict[int, Found]]


def chosen_layers(text: str | None, default: str, layers: int) -> list[int]:
    """`last`, `all`, `3`, `0,5,11`, `6-11`; counted from 0, negative from the end."""
    wanted = text or default
    if wanted == "all":
        return list(range(layers))
    if wanted == "last":
        return [layers - 1]
    if wanted == "spread":  # evenly, the last included
        step = max(1, -(-layers // SPREAD))
        return list(range(layers - 1, -1, -step))[::-1]
    chosen: set[int] = set()
    for part in wanted.split(","):
        first, dash, last = part.strip().rpartition("-")
        try:
            ends = (int(first), int(last)) if dash and first else (int(part), int(part))
        except ValueError:
            raise UsageError(f"--layer {wanted[:40]!r}: expected last, all, a number, 0,5,11 or 6-11") from None
        low, high = (end + layers if end < 0 else end for end in ends)
        if not 0 <= low <= high < layers:
            raise UsageError(f"--layer {part.strip()}: the model has layers 0 to {layers - 1}")
        chosen.update(range(low, high + 1))
    return sorted(chosen)


def attach(what: str, capture: Capture, opened: Opened, settings: Settings) -> Results:
    """Listens for one measurement; what is returned gives its results by layer once the capture has run."""
    layers = chosen_layers(settings.layer, CATALOGUE[what].layers, opened.anatomy.layers)
    check_tokens(opened.anatomy, settings.tokens)
    return _ATTACH[what](capture, opened, settings, layers)


def _site(what: str, layer: int, settings: Settings) -> Site:
    if what == "snr":
        return Site(layer, "mlp_input", settings.tokens)
    return Site(layer, "output", settings.tokens, settings.norm_of(what) or "before")


def _attach_plain(what: str, make: Callable[[], Spectrum | CosineSimilarity | SignalToNoise]) -> "Attach":
    """Measurements of tokens alone."""

    def attach_(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
        parts = {layer: make() for layer in layers}
        for layer, part in parts.items():
            capture.on_tokens(_site(what, layer, settings), lambda tokens, _, part=part: part.update(tokens))  # type: ignore[misc]
        return lambda: {layer: part.result() for layer, part in parts.items()}

    return attach_


def _attach_anova(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    examples, width = opened.examples, opened.anatomy.width
    parts = {
        layer: Anova(len(examples.classes), width, by_token=examples.by_token, min_count=settings.min_count)
        for layer in layers
    }
    for layer, part in parts.items():
        _listen(capture, _site("anova", layer, settings), lambda x, y, _, part=part: part.update(x, y))  # type: ignore[misc]
    return lambda: {layer: part.result() for layer, part in parts.items()}


def _attach_collapse(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    classifier = _classifier(opened, "collapse")
    parts = {layer: Collapse(classifier) for layer in layers}
    for layer, part in parts.items():
        _listen(capture, _site("collapse", layer, settings), lambda x, y, _, part=part: part.update(x, y))  # type: ignore[misc]
        capture.on_logits(lambda logits, _, part=part: part.update_logits(logits))  # type: ignore[misc]
    return lambda: {layer: part.result() for layer, part in parts.items()}


def _attach_simplex(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    classifier = _classifier(opened, "simplex")
    classes = chosen_classes(settings, opened.examples, 3)
    if len(classes) != 3:
        raise DoesNotFit(f"simplex shows three classes, --classes or the data gives {len(classes)}; name three")
    rows, center = classifier[classes], settings.center == "global"
    parts = {layer: Simplex(rows, classes, center=center, seed=settings.seed) for layer in layers}
    for layer, part in parts.items():
        _listen(capture, _site("simplex", layer, settings), lambda x, y, n, part=part: part.update(x, y, n))  # type: ignore[misc]
    return lambda: {layer: part.result() for layer, part in parts.items()}


def _attach_pca(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    classes = chosen_classes(settings, opened.examples, COLOURED)
    parts = {layer: PCA(classes, settings.seed) for layer in layers}
    for layer, part in parts.items():
        _listen(capture, _site("pca", layer, settings), lambda x, y, n, part=part: part.update(x, y, n))  # type: ignore[misc]
    return lambda: {layer: part.result() for layer, part in parts.items()}


def _attach_updates(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    plan = opened.plan
    parts = {layer: Updates(plan.heads, plan.per_layer[layer]) for layer in layers}
    for layer, part in parts.items():
        capture.on_heads(layer, lambda inputs, _, part=part: part.update(inputs))  # type: ignore[misc]
    return lambda: {layer: part.result() for layer, part in parts.items()}


def _attach_features(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    """Not of the batches: pictures of its own, after the pass."""
    examples = opened.examples
    assert isinstance(examples, ImageExamples)
    norm = settings.norm_of("features") or "after"
    pictures = examples.pictures(settings.images, PICTURES)
    parts = {layer: Features(opened.anatomy, examples, layer, norm, "the model") for layer in layers}
    return lambda: {layer: part.result(pictures) for layer, part in parts.items()}


def _listen(capture: Capture, site: Site, update: Callable[[Tensor, Tensor, int], None]) -> None:
    """Tokens with their classes and the number of the first sequence."""

    def listener(tokens: Tensor, batch: Batch) -> None:
        assert batch.labels is not None
        update(tokens, batch.labels.to(tokens.device), batch.first)

    capture.on_tokens(site, listener)


def _classifier(opened: Opened, what: str) -> np.ndarray:
    head = opened.anatomy.classifier
    classes = len(opened.examples.classes)
    if head is None or head.out_features != classes:
        has = "no classifier" if head is None else f"a classifier of {head.out_features:,} classes"
        raise DoesNotFit(f"{what}: the model has {has} and the data {classes:,} classes; see --data")
    return head.weight.detach().double().cpu().numpy()


def chosen_classes(settings: Settings, examples: Examples, count: int) -> list[int]:
    """Those of --classes; else a seeded draw of `count` that are in the data, of next tokens the most frequent."""
    names = examples.classes
    if settings.classes is None:
        counts = examples.class_counts()
        if examples.by_token:
            order = np.argsort(-counts, kind="stable")
        else:
            order = np.random.default_rng(settings.seed).permutation(len(counts))
        return [int(index) for index in order if counts[index] > 0][:count]
    chosen = []
    for part in (part.strip() for part in settings.classes.split(",")):
        named = [index for index in range(len(names)) if names[index] == part]
        if not named and part.isdecimal() and int(part) < len(names):
            named = [int(part)]
        if not named:
            raise UsageError(
                f"--classes: there is no class {part[:60]!r}; give names, or numbers 0 to {len(names) - 1}"
            )
        chosen.append(named[0])
    if len(set(chosen)) != len(chosen):
        raise UsageError(f"--classes {settings.classes[:60]!r} names a class twice")
    return chosen


Attach = Callable[[Capture, Opened, Settings, list[int]], Results]
_ATTACH: dict[str, Attach] = {
    "spectrum": _attach_plain("spectrum", Spectrum),
    "anova": _attach_anova,
    "cossim": _attach_plain("cossim", CosineSimilarity),
    "snr": _attach_plain("snr", SignalToNoise),
    "collapse": _attach_collapse,
    "simplex": _attach_simplex,
    "pca": _attach_pca,
    "updates": _attach_updates,
    "features": _attach_features,
}
