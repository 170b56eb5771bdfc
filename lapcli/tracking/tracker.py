"""The interface of a tracker, and the ids of runs in all of them."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lapcli.runs import Run
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import remove

FOLDER = "track"  # of a run: what was sent to each tracker


class Session(ABC):
    """One session of writing to a tracker; what it wrote counts once it is closed."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def scores(self, step: int, values: Mapping[str, float]) -> None:
        """Add the scores of an evaluation, whose step may lie far back."""

    @abstractmethod
    def text(self, name: str, text: str, step: int) -> None: ...

    @abstractmethod
    def image(self, name: str, file: Path, step: int) -> None:
        """Add a figure, a PNG file."""

    @abstractmethod
    def close(self) -> None: ...


class Tracker(ABC):
    name: str

    @abstractmethod
    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session: ...

    def pieces(self, run: Run) -> list[str]:
        """Return the files or folders of closed sessions in the tracker's own store, if it has one."""
        return []

    @abstractmethod
    def remove_unrecorded(self, run: Run, pieces: Sequence[str]) -> bool:
        """Remove what a killed session left, but not these pieces; False: the whole run had to be removed."""


def remove_other_pieces(folder: Path, existing: Sequence[str], recorded: Sequence[str]) -> None:
    for name in set(existing) - set(recorded):
        path = folder / name
        remove(path)


def config_of(recipe: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten a recipe to dotted keys, by which trackers filter and group runs."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= config_of(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return flat


def run_id(run: Run) -> str:
    """Return an id made from recipe, seed and time of creation, which a renamed run keeps."""
    # W&B never gives a deleted id free again, so a run that is trained anew needs another: `created` makes it so.
    text = f"{run.info.get('recipe_sha256')} {run.info.get('seed')} {run.info.get('created')}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_installed(name: str) -> None:
    """Raise UsageError if the package of a tracker is not installed; nothing is imported."""
    if find_spec(name) is None:
        raise missing_package(name)


def missing_package(package: str) -> UsageError:
    return UsageError(f"the package {package} is not installed; pip install 'lapcli[{package}]'")
