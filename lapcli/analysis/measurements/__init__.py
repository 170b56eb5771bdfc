"""The measurements of `lap analyze` by name. torch is not imported, so that `--help` is quick."""

from collections.abc import Sequence

from lapcli.analysis.measurement import Measurement
from lapcli.runtime.errors import UsageError
from lapcli.runtime.plugins import Registry

_PLACE = "lapcli.analysis.measurements"
MEASUREMENTS: Registry[type[Measurement]] = Registry(
    "analysis",
    {
        "spectrum": f"{_PLACE}.spectrum:Spectrum",
        "anova": f"{_PLACE}.anova:Anova",
        "cossim": f"{_PLACE}.similarity:CosineSimilarity",
        "snr": f"{_PLACE}.similarity:SignalToNoise",
        "collapse": f"{_PLACE}.collapse:Collapse",
        "simplex": f"{_PLACE}.scatter:Simplex",
        "pca": f"{_PLACE}.scatter:PrincipalComponents",
        "updates": f"{_PLACE}.updates:HeadUpdates",
        "features": f"{_PLACE}.features:Features",
        "sinks": f"{_PLACE}.heads:Sinks",
        "mixing": f"{_PLACE}.heads:OperatorMixing",
        "ov": f"{_PLACE}.heads:Ov",
    },
)


def measurements_for(gives: frozenset[str]) -> list[str]:
    """Return the names of the measurements for models that provide this."""
    return [name for name in MEASUREMENTS if MEASUREMENTS[name].needs <= gives]


def check_fits(names: Sequence[str], models: Sequence[tuple[str, frozenset[str]]]) -> None:
    """Refuse measurements that do not fit every model; `models`: the objective and abilities of each."""
    possible = measurements_for(frozenset.intersection(*(gives for _, gives in models)))
    for name in names:
        if name not in possible:
            objectives = " and ".join(sorted({objective for objective, _ in models}))
            raise UsageError(f"{name} does not apply to models of {objectives}; these do: {', '.join(possible)}")
