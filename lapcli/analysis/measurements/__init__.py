"""The measurements of `lap analyze` by name, one file for each. torch is not imported, so that `--help` is quick."""

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules

from lapcli.analysis.measurement import Measurement
from lapcli.runtime.errors import UsageError
from lapcli.runtime.plugins import Registry


def _built_in() -> dict[str, str]:
    """Find every measurement that is defined in a file of this folder, sorted by `order`."""
    declared: list[type[Measurement]] = []
    for module in iter_modules(__path__, f"{__name__}."):
        values = vars(import_module(module.name)).values()
        classes = [value for value in values if isinstance(value, type) and issubclass(value, Measurement)]
        # Files also import the base class, and may import each other's measurements.
        declared += [value for value in classes if value.__module__ == module.name]
    declared.sort(key=lambda measurement: (measurement.order, measurement.name))
    return {measurement.name: f"{measurement.__module__}:{measurement.__name__}" for measurement in declared}


MEASUREMENTS: Registry[type[Measurement]] = Registry("analysis", _built_in())


def measurements_for(gives: frozenset[str]) -> list[str]:
    """Return the names of the measurements for models that provide this."""
    return [name for name in MEASUREMENTS if MEASUREMENTS[name].needs <= gives]


def check_fits(names: Sequence[str], models: Sequence[tuple[str, frozenset[str]]]) -> None:
    """Refuse measurements that do not fit every model; of each model its kind and what it gives."""
    possible = measurements_for(frozenset.intersection(*(gives for _, gives in models)))
    for name in names:
        if name not in possible:
            kinds = " and ".join(sorted({kind for kind, _ in models}))
            raise UsageError(f"{name} does not apply to models of {kinds}; these do: {', '.join(possible)}")
