"""Named data sources, which a recipe may use instead of files and hub data sets.

`builtin` names the text that comes with lap, `plugin:NAME` a source that an installed package adds. This module does
not import torch, since names are checked with the recipe. The sources themselves are in `lapcli.data`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lapcli.recipe.section import Section
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.plugins import Registry

if TYPE_CHECKING:
    from lapcli.data.sources import DataSource

Modality = Literal["text", "images", "chat"]
PREFIX = "plugin:"
DATA_SOURCES: "Registry[DataSource]" = Registry(
    "data source", {"python_documentation": "lapcli.data.text.builtin:PYTHON_DOCUMENTATION"}
)


def find_source(source: str, modality: Modality) -> "DataSource | None":
    """Return the source that a recipe names; None for files, folders and hub data sets; UsageError if it is unknown."""
    if modality == "text" and source == "builtin":
        return DATA_SOURCES["python_documentation"]
    if not source.startswith(PREFIX):
        return None
    entry = DATA_SOURCES[source.removeprefix(PREFIX)]
    if entry.modality != modality:
        raise UsageError(f"the data source {entry.name} provides {entry.modality}, not {modality}; choose another")
    return entry


def unusable_sources(recipe: Section) -> list[tuple[str, str]]:
    """Return the keys of a recipe whose source is not installed or has the wrong modality, each with the reason."""
    reasons = []
    for key, source, modality in _sources(recipe, PREFIX):
        try:
            find_source(source, modality)
        except UsageError as error:
            reasons.append((key, str(error)))
    return reasons


def check_local_files(recipe: Section) -> None:
    """Refuse missing files and folders before torch is loaded, so that a typo is reported at once."""
    for key, source, _ in _sources(recipe):
        if key.rpartition(".")[2] in ("train", "validation", "source"):
            check_local_file(key, source)


def check_local_file(key: str, source: str) -> None:
    is_named = source.startswith(("builtin", "hub:", "https://", PREFIX)) or source in ("system", "last_file")
    if not is_named and not os.path.exists(Path(source).expanduser()):
        hub = f" (hub:{source[:100]}?)" if source.count("/") == 1 else ""
        raise DataError(
            f"{key}: there is no {source[:200]}; give `builtin`, `hub:OWNER/NAME`{hub}, or a file or folder"
        )


def _sources(section: Section, prefix: str = "", path: str = "") -> Iterator[tuple[str, str, Modality]]:
    """Yield key, value and modality of the values of a recipe that begin with `prefix` and may be a source."""
    modality: Any = getattr(section, "modality", None)
    for key, value in section:
        if modality and isinstance(value, str) and value.startswith(prefix):
            yield f"{path}{key}", value, modality
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Section):
                yield from _sources(item, prefix, f"{path}{key}.")
