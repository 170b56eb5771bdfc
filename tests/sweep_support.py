"""A tiny recipe as a file, and sweeps over it whose cells can be trained in this process."""

import copy
from pathlib import Path
from typing import Any

import yaml
from support import TINY, train_here, write_text

from lapcli.experiments.sweep import Sweep, load_sweep


def write_recipe(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write `tiny.yaml` in that folder, on a text file beside it."""
    values = copy.deepcopy(TINY)
    values["data"]["train"] = str(write_text(folder / "text.txt"))
    for name, keys in sections.items():
        values[name] = {**values.get(name, {}), **keys}
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train_cells(cells: Any, runs: Path) -> None:
    """Train the cells like their `lap train`."""
    for cell in cells:
        train_here(cell.loaded, runs, cell.name)


def sweep_of(path: Path, *options: str, over: Any = None, then: Any = (), tune: bool = True) -> Sweep:
    return load_sweep(path, options, over=over or {}, then=then, tune=tune)
