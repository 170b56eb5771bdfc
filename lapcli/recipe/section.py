"""The parts of a recipe's sections: strict types with ranges, and checks of combinations that cannot work.

An unknown key is refused, and no key is parsed and then ignored.
"""

from collections.abc import Callable
from types import UnionType
from typing import Annotated, Any, Self, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo


def _whole(value: Any) -> Any:
    """Turn a whole float into an int: `steps: 1e3` is meant as a whole number, though YAML reads a float."""
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
#: The fraction of the training examples that is held out.
HeldOut = Annotated[float, Field(gt=0, lt=1)]


def _ascending(value: list[float]) -> list[float]:
    if value[0] > value[1]:
        raise ValueError("must go from the smaller fraction to the larger")
    return value


#: The smallest and the largest fraction of something.
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
        """Return keys to which other values leave no effect, with the reason, for a warning instead of an error."""
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
