"""The measurements of `lap analyze` by name. No torch in here: help and the checks of a command line ask it."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from lapcli.analysis import measurements
from lapcli.analysis.measurement import Measurement, Option
from lapcli.runtime.errors import LapError

_DECLARED = ("name", "help", "definition", "columns")


class Registry(Mapping[str, type[Measurement]]):
    """Measurements in their order; those in `lapcli/analysis/measurements` are there from the start."""

    def __init__(self) -> None:
        self._measurements: dict[str, type[Measurement]] = {}
        for found in pkgutil.iter_modules(measurements.__path__, f"{measurements.__name__}."):
            for value in vars(importlib.import_module(found.name)).values():
                if isinstance(value, type) and issubclass(value, Measurement) and value.__module__ == found.name:
                    self.add(value)

    def add(self, measurement: type[Measurement]) -> None:
        """Makes a measurement known to `lap analyze`, to its output and to reports."""
        missing = [name for name in _DECLARED if not hasattr(measurement, name)]
        if missing:
            raise LapError(f"the measurement {measurement.__qualname__} does not declare {', '.join(missing)}")
        if measurement.name in self._measurements:
            raise LapError(f"there is already a measurement called {measurement.name!r}; choose another name")
        known = {option.name: option for option in self.options()}
        for option in measurement.options:
            if known.get(option.name, option) != option:
                raise LapError(f"{measurement.name}: another measurement declares the option {option.flag} differently")
        self._measurements[measurement.name] = measurement
        self._measurements = dict(sorted(self._measurements.items(), key=lambda item: (item[1].order, item[0])))

    def __getitem__(self, name: str) -> type[Measurement]:
        return self._measurements[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._measurements)

    def __len__(self) -> int:
        return len(self._measurements)

    def fitting(self, offers: frozenset[str]) -> list[str]:
        """Names of the measurements for models that offer this."""
        return [name for name, measurement in self._measurements.items() if measurement.needs <= offers]

    def options(self) -> list[Option]:
        """The options of all measurements, each once."""
        return list(dict.fromkeys(option for m in self._measurements.values() for option in m.options))


MEASUREMENTS = Registry()
