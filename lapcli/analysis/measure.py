"""Attaches measurements to a capture: which tokens of which layers feed which accumulator."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lapcli.analysis.anatomy import check_tokens
from lapcli.analysis.anova import Anova
from lapcli.analysis.capture import Batch, Capture, Site
from lapcli.analysis.catalogue import CATALOGUE
from lapcli.analysis.cosine import CosineSimilarity
from lapcli.analysis.found import Found
from lapcli.analysis.snr import SignalToNoise
from lapcli.analysis.spectrum import Spectrum
from lapcli.analysis.subjects import Opened
from lapcli.errors import UsageError

SPREAD = 6  # layers of a figure that shows some of them


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


def _attach_plain(what: str, make: Callable[[], Spectrum | CosineSimilarity | SignalToNoise]):  # type: ignore[no-untyped-def]
    """Measurements of tokens alone."""

    def attach_(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
        parts = {layer: make() for layer in layers}

        def listener(part: Spectrum | CosineSimilarity | SignalToNoise) -> Callable[[Tensor, Batch], None]:
            return lambda tokens, batch: part.update(tokens)

        for layer, part in parts.items():
            capture.on_tokens(_site(what, layer, settings), listener(part))
        return lambda: {layer: part.result() for layer, part in parts.items()}

    return attach_


def _attach_anova(capture: Capture, opened: Opened, settings: Settings, layers: list[int]) -> Results:
    examples = opened.examples
    parts = {
        layer: Anova(
            len(examples.classes),
            opened.anatomy.width,
            by_token=examples.by_token,
            min_count=settings.min_count,
        )
        for layer in layers
    }

    def listener(part: Anova) -> Callable[[Tensor, Batch], None]:
        def update(tokens: Tensor, batch: Batch) -> None:
            assert batch.labels is not None
            part.update(tokens, batch.labels.to(tokens.device))

        return update

    for layer, part in parts.items():
        capture.on_tokens(_site("anova", layer, settings), listener(part))
    return lambda: {layer: part.result() for layer, part in parts.items()}


_ATTACH: dict[str, Callable[[Capture, Opened, Settings, list[int]], Results]] = {
    "spectrum": _attach_plain("spectrum", Spectrum),
    "anova": _attach_anova,
    "cossim": _attach_plain("cossim", CosineSimilarity),
    "snr": _attach_plain("snr", SignalToNoise),
}
