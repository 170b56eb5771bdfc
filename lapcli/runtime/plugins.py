"""Registries of interchangeable parts, and the packages that add to them.

A registry holds the entries of one type (objectives, analyses, benchmarks, ...) by name. Other packages add
theirs through the entry point group `lap.plugins`: one entry point names one module with `register(extensions)`:

    def register(extensions):
        extensions.add("analysis", Entropy)

Those modules are imported when a name is unknown or when names are listed, and never for `--help`. A module that
cannot be imported is named in a warning and skipped; a name that is already taken is an error. Recipes stay data: they
name what is installed, never a file to run.
"""

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from lapcli.runtime.errors import UsageError

GROUP = "lap.plugins"
SORTS = ("objective", "operator", "analysis", "benchmark", "optimizer", "data source")  # that other packages may add


E = TypeVar("E")


#: Entries of other packages, with the package, by type and name. They are kept apart from the registries, whose
#: modules may be imported later than the plugins.
_added: dict[str, dict[str, tuple[Any, str]]] = {}


class Registry(Generic[E]):
    """Entries of one type by name.

    `built_in` maps names to `module:attribute`, imported on first use: names are known without importing torch.
    """

    def __init__(self, sort: str, built_in: Mapping[str, str]) -> None:
        self.sort = sort
        self._places = dict(built_in)

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._of_plugins()

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names: the built-in ones in their order, then those of other packages."""
        return iter((*self._places, *self._of_plugins()))

    def __getitem__(self, name: str) -> E:
        """Return the entry of that name; UsageError with the nearest name if there is none."""
        entry: E
        if name in self._places:
            module, _, attribute = self._places[name].partition(":")
            entry = getattr(import_module(module), attribute)
            return entry
        if name not in self._of_plugins():
            near = get_close_matches(name, self, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(self)}"
            raise UsageError(f"there is no {self.sort} {name[:60]!r}{hint}")
        entry, _ = self._of_plugins()[name]
        return entry

    def built_in(self) -> list[str]:
        """Return the names that are known without importing plugins, for `--help`."""
        return list(self._places)

    def _of_plugins(self) -> dict[str, tuple[E, str]]:
        load_plugins()
        entries = _added.get(self.sort, {})
        for name in self._places.keys() & entries.keys():
            raise _taken(self.sort, name, entries[name][1], "lap")
        return entries


def _taken(sort: str, name: str, package: str, owner: str) -> UsageError:
    return UsageError(
        f"the package {package} adds the {sort} {name!r}, which {owner} has already; rename it there or uninstall "
        "one of them"
    )


class Extensions:
    """The object to which a plugin's `register` adds its entries."""

    def __init__(self, package: str) -> None:
        self._package = package

    def add(self, sort: str, entry: Any) -> None:
        """Add an entry under its `name` to the registry of its type.

        An objective is added by its recipe type, which names its class; an optimizer also supplies its section of the
        recipe.
        """
        if sort not in SORTS:
            raise ValueError(f"there is no extension type {sort!r}; expected one of {', '.join(SORTS)}")
        name = entry.objective_name() if sort == "objective" else entry.name
        entries = _added.setdefault(sort, {})
        if name in entries:
            raise _taken(sort, name, self._package, f"the package {entries[name][1]}")
        entries[name] = entry, self._package
        if sort == "optimizer":
            _added.setdefault("optimizer section", {})[name] = entry.section, self._package


_are_loaded = False


def load_plugins() -> None:
    """Import the plugins that other packages declare, once per process."""
    global _are_loaded
    if _are_loaded:
        return
    _are_loaded = True  # before the loop: a plugin that looks up a name while it registers would load them again
    for point in entry_points(group=GROUP):
        package = point.dist.name if point.dist else point.module
        try:
            point.load().register(Extensions(package))
        except UsageError:
            raise
        except Exception as error:  # third-party code must not break a command that works without it
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(f"lap: the plugin {package} ({point.value}) is skipped: {reason}", file=sys.stderr)
