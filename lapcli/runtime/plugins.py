"""Registries of interchangeable parts, and the packages that add to them.

A registry holds the entries of one sort (objectives, analyses, benchmarks, ...) by name. Other packages add
theirs through the entry point group `lap.plugins`: one entry point names one module with `register(extensions)`:

    def register(extensions):
        extensions.add("analysis", Entropy)

Those modules are imported when a name is unknown or when names are listed, and never for `--help`. A module that
cannot be imported is named in a warning and skipped; a name that is already taken is an error. Recipes stay data: they
name what is installed, never a file to run.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, TypeVar

from lapcli.runtime.errors import UsageError

GROUP = "lap.plugins"
SORTS = ("objective", "operator", "analysis", "benchmark", "optimizer", "data source")  # that other packages may add


E = TypeVar("E")


@dataclass(frozen=True)
class Origin:
    """The package that added an entry; `run.json` records it."""

    package: str
    version: str


class Registry(Generic[E]):
    """Entries of one sort by name.

    `built_in` maps names to `module:attribute`, imported on first use: names are known without importing torch.
    """

    by_sort: ClassVar[dict[str, "Registry[Any]"]] = {}

    def __init__(self, sort: str, built_in: Mapping[str, str]) -> None:
        self.sort = sort
        self._places = dict(built_in)
        self._entries: dict[str, E] = {}
        self._origins: dict[str, Origin] = {}
        Registry.by_sort[sort] = self
        # Plugins may be loaded before the module of a registry is imported; their entries wait for it.
        for name, (entry, origin) in _waiting.pop(sort, {}).items():
            self._add(name, entry, origin)

    def __contains__(self, name: object) -> bool:
        if name not in self._places and name not in self._entries:
            load_plugins()
        return name in self._places or name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names: the built-in ones in their order, then those of other packages."""
        load_plugins()
        return iter(dict.fromkeys((*self._places, *self._entries)))

    def __getitem__(self, name: str) -> E:
        """Return the entry of that name; UsageError with the nearest name if there is none."""
        if name not in self:
            names = list(self)
            near = get_close_matches(name, names, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"
            raise UsageError(f"there is no {self.sort} {name[:60]!r}{hint}")
        if name not in self._entries:
            module, _, attribute = self._places[name].partition(":")
            self._entries[name] = getattr(import_module(module), attribute)
        return self._entries[name]

    def built_in(self) -> list[str]:
        """Return the names that are known without importing plugins, for `--help`."""
        return list(self._places)

    def origin(self, name: str) -> Origin | None:
        """Return the package that added the entry; None for one of lap's own."""
        return self._origins.get(name)

    def _add(self, name: str, entry: E, origin: Origin) -> None:
        if name in self._places or name in self._entries:
            other = self._origins.get(name)
            owner = f"the package {other.package}" if other else "lap"
            raise UsageError(
                f"the package {origin.package} adds the {self.sort} {name!r}, which {owner} has already; "
                "rename it there or uninstall one of them"
            )
        self._entries[name], self._origins[name] = entry, origin


_waiting: dict[str, dict[str, tuple[Any, Origin]]] = {}  # for registries whose module is not imported yet
_are_loaded = False


class Extensions:
    """What a plugin's `register` adds its entries to."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin

    def add(self, sort: str, entry: Any) -> None:
        """Add an entry under its `name` to the registry of a sort.

        An objective is added by the type of its recipes, which names its class; an optimizer brings its section of a
        recipe along.
        """
        if sort not in SORTS:
            raise ValueError(f"there is no sort {sort!r} of extension; there are {', '.join(SORTS)}")
        name = entry.objective_name() if sort == "objective" else entry.name
        self._add(sort, name, entry)
        if sort == "optimizer":
            self._add("optimizer section", entry.name, entry.section)

    def _add(self, sort: str, name: str, entry: Any) -> None:
        registry = Registry.by_sort.get(sort)
        if registry is not None:
            registry._add(name, entry, self._origin)
            return
        waiting = _waiting.setdefault(sort, {})
        if name in waiting:
            raise UsageError(f"two packages add the {sort} {name!r}; uninstall one of them")
        waiting[name] = entry, self._origin


def origin_of(sort: str, name: str) -> Origin | None:
    """Return the package that added an entry, even if its registry's module is not imported; None for lap's own.

    Imports nothing: a name that is in use was looked up before, and the lookup has loaded the plugins.
    """
    registry = Registry.by_sort.get(sort)
    if registry is not None:
        return registry.origin(name)
    return _waiting[sort][name][1] if name in _waiting.get(sort, {}) else None


def load_plugins() -> None:
    """Import the plugins that other packages declare, once per process."""
    global _are_loaded
    if _are_loaded:
        return
    _are_loaded = True  # before the loop: a plugin that looks up a name while it registers would load them again
    for point in entry_points(group=GROUP):
        _load(point)


def _load(point: EntryPoint) -> None:
    package = point.dist.name if point.dist else point.module
    origin = Origin(package, point.dist.version if point.dist else "unknown")
    try:
        point.load().register(Extensions(origin))
    except UsageError:
        raise
    except Exception as error:  # third-party code must not break a command that works without it
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        print(f"lap: the plugin {package} ({point.value}) is skipped: {reason}", file=sys.stderr)
