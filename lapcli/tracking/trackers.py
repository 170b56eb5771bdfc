"""The trackers: TensorBoard and Weights & Biases. Their packages are extras, imported when a run is sent to them."""

import contextlib
import hashlib
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lapcli.catalogue.listing import plan_of
from lapcli.runs import Run
from lapcli.runtime.errors import LapError, UsageError


class Session(ABC):
    """One writing to a tracker; nothing of it counts before it is closed."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    @abstractmethod
    def scores(self, step: int, values: Mapping[str, float]) -> None:
        """Of an evaluation, whose step may be long past."""

    @abstractmethod
    def text(self, name: str, text: str, step: int) -> None: ...

    @abstractmethod
    def image(self, name: str, file: Path, step: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Tracker(ABC):
    name: str

    @abstractmethod
    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session: ...

    @abstractmethod
    def store(self, run: Run) -> Path:
        """The folder of its pieces."""

    @abstractmethod
    def pieces(self, run: Run) -> list[str]:
        """What closed sessions have left in the store."""

    def remove_others(self, run: Run, pieces: Sequence[str]) -> None:
        """Removes pieces of sessions that were killed."""
        for name in set(self.pieces(run)) - set(pieces):
            path = self.store(run) / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class TensorBoard(Tracker):
    """Event files in `runs/NAME/tensorboard/`; `tensorboard --logdir runs` shows all runs."""

    name = "tensorboard"

    def store(self, run: Run) -> Path:
        return run.path / "tensorboard"

    def pieces(self, run: Run) -> list[str]:
        return sorted(path.name for path in self.store(run).glob("events.*"))

    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise _missing(self.name) from None
        return _EventFile(SummaryWriter(str(self.store(run)), flush_secs=5))


class _EventFile(Session):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        self.scalars(step, values)

    def text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, f"```\n{text}\n```", step)

    def image(self, name: str, file: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(file) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WandB(Tracker):
    """A run of W&B for each run, found by an id of its own. Offline, each session is a folder for `wandb sync`."""

    name = "wandb"

    def __init__(self, project: str = "lap", offline: bool = False) -> None:
        self._project, self._offline = project, offline

    def store(self, run: Run) -> Path:
        return run.path / "track" / "wandb"

    def pieces(self, run: Run) -> list[str]:
        return sorted(path.name for path in self.store(run).glob("offline-run-*"))

    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session:
        # Nothing but the run's own numbers leaves the machine: no error reports, no source code, no git remote.
        for variable in ("WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE", "WANDB_SILENT"):
            os.environ.setdefault(variable, "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb
        except ImportError:
            raise _missing(self.name) from None
        try:
            opened = wandb.init(
                project=self._project,
                id=run_id(run),
                name=run.name,
                config=config_of(dict(recipe)),
                tags=[f"laplacian_heads {plan_of(run)}"[:64]],
                dir=str(run.path / "track"),
                mode="offline" if self._offline else None,
                resume="allow",
                reinit="create_new",
                settings=wandb.Settings(
                    x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, console="off"
                ),
            )
        except wandb.Error as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise LapError(f"W&B cannot be used ({reason}); log in with `wandb login`, or use --offline") from None
        return _WandBRun(opened, wandb)


class _WandBRun(Session):
    def __init__(self, run: Any, wandb: Any) -> None:
        self._run, self._wandb = run, wandb

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # the server drops steps that it has

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update({**values, "eval/step": step})  # W&B's history takes no step of the past

    def text(self, name: str, text: str, step: int) -> None:
        self._run.summary[name] = text

    def image(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._wandb.Image(str(file))})

    def close(self) -> None:
        with contextlib.suppress(self._wandb.Error):
            self._run.finish()


def config_of(recipe: dict[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe with dotted keys, as trackers filter and group runs by."""
    flat: dict[str, Any] = {}
    for key, value in recipe.items():
        if isinstance(value, dict):
            flat |= config_of(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value if isinstance(value, str | int | float | None) else json.dumps(value)
    return flat


def run_id(run: Run) -> str:
    """The same however the run is renamed: by recipe, seed and beginning."""
    text = f"{run.info.get('recipe_sha256')} {run.info.get('seed')} {run.info.get('created')}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _missing(package: str) -> UsageError:
    return UsageError(f"the package {package} is not installed; pip install 'lapcli[{package}]'")
