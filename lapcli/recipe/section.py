"""The parts of a recipe's sections: strict types with ranges, and checks of invalid combinations.

An unknown key is refused, and no key is parsed and then ignored. Named data sources may stand in place of files and hub
data sets: `builtin` is the text that comes with lap, `plugin:NAME` a source that an installed package adds. Their names
are checked with the recipe, without torch; the sources themselves are in `lapcli.data`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.plugins import Registry

if TYPE_CHECKING:
    from lapcli.data.sources import DataSource


def _whole(value: Any) -> Any:
    """Turn an integral float into an int: `steps: 1e3` means an integer, though YAML reads a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
# Wide enough for any real model and far below what overflows; a typo with ten zeros too many is caught here.
Count = Annotated[Whole, Field(ge=1, le=10**12)]
Size = Annotated[Whole, Field(ge=1, le=2**20)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0, le=1e6)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]

#: Names of files, ranges such as a_{00..23}.parquet, or local globs, in order.
Files = Annotated[Text | list[Text] | None, Field(description="text or a list of texts")]
#: The held-out fraction of the training examples.
HeldOut = Annotated[float, Field(gt=0, lt=1)]


def _ascending(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError("must go from the smaller fraction to the larger")
    return value


#: A smallest and a largest fraction.
FractionRange = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=2, max_length=2), AfterValidator(_ascending)
]

Check = Callable[[Any], str | None]
C = TypeVar("C", bound=Check)


def wrong_hub_name(source: str) -> str | None:
    """Explain why `hub:...` is not a valid data set name; None if it is valid, or if the source is not on the hub."""
    owner, _, name = source.removeprefix("hub:").partition("/")
    if source.startswith("hub:") and (not owner or not name or "/" in name):
        return f"expected hub:OWNER/NAME, got {source[:60]!r}"
    return None


def unfixed_files(source: str, files: str | list[str] | None) -> str | None:
    """Return why the files of a hub data set are not fixed by the recipe; None if they are, or for another source."""
    if source.startswith("hub:") and (files is None or any(mark in str(files) for mark in "*?")):
        return "name the hub data set's files, or a range such as a_{000..239}.parquet: the recipe fixes the list"
    return None


def combination(*keys: str) -> Callable[[C], C]:
    """Mark a method that returns why `keys` conflict, or None; the problem is reported at the first key."""

    def mark(check: C) -> C:
        check.combination_keys = keys  # type: ignore[attr-defined]
        return check

    return mark


class Conflicts(ValueError):
    """Keys of a section that cannot be combined, each group with the reason."""

    def __init__(self, found: list[tuple[tuple[str, ...], str]]) -> None:
        self.found = found
        super().__init__("; ".join(f"{keys[0]}: {reason}" for keys, reason in found))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _combinations_hold(self) -> Self:
        members = (member for parent in type(self).__mro__ for member in list(vars(parent).values()))
        checks = ((keys, check) for check in members if (keys := getattr(check, "combination_keys", None)))
        if found := [(keys, reason) for keys, check in checks if (reason := check(self))]:
            raise Conflicts(found)
        return self

    def ignored(self) -> dict[str, str]:
        """Return keys without effect under the other values, with the reason, for a warning instead of an error."""
        return {}


def members(annotation: Any) -> list[Any]:
    """Return the members of a union without None; any other annotation is its own single member."""
    if get_origin(annotation) in (Union, UnionType):
        return [member for member in get_args(annotation) if member is not type(None)]
    return [annotation]


def inner_section(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a key's value or of its list items."""
    only = members(field.annotation)
    if len(only) == 1 and get_origin(only[0]) is list:
        only = members(get_args(only[0])[0])
    return only[0] if len(only) == 1 and isinstance(only[0], type) and issubclass(only[0], Section) else None


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
    is_named = source.startswith(("builtin", "hub:", "https://", PREFIX))
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
