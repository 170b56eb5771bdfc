"""Weights & Biases: one W&B run for each run, found by `run_id`. Offline, each session is a folder."""

import os
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lapcli.catalogue.listing import plan_of
from lapcli.runs import Run
from lapcli.runtime.errors import LapError
from lapcli.tracking.tracker import Session, Tracker, config_of, missing_package, remove_other_pieces, run_id


class WandB(Tracker):
    """W&B. `offline`: write folders for `wandb sync` and send nothing, like WANDB_MODE=offline."""

    name = "wandb"

    def __init__(self, project: str | None = None, offline: bool = False) -> None:
        self._project, self._offline = project or os.environ.get("WANDB_PROJECT") or "lap", offline

    def pieces(self, run: Run) -> list[str]:
        return sorted(path.name for path in _folder(run).glob("offline-run-*"))

    def remove_unrecorded(self, run: Run, pieces: Sequence[str]) -> bool:
        """Remove local folders. What was sent stays on the server, which drops steps that it already has."""
        existing = self.pieces(run)
        remove_other_pieces(_folder(run), existing, pieces)
        if set(existing) - set(pieces):
            # W&B names a folder by the second, and its process may outlive the one that was killed: a session of the
            # same second would share the folder with it.
            time.sleep(1 - time.time() % 1)
        return True

    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session:
        # Nothing but the run's own numbers leaves the machine: no error reports, no source code, no git remote.
        for variable in ("WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE", "WANDB_SILENT"):
            os.environ.setdefault(variable, "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        _leave_inherited_service()
        try:
            import wandb
        except ImportError:
            raise missing_package(self.name) from None
        try:
            opened = wandb.init(
                project=self._project,
                id=run_id(run),
                name=run.name,
                config=config_of(recipe),
                tags=[f"laplacian_heads {plan_of(run)}"[:64]],
                dir=str(run.path / "track"),
                mode="offline" if self._offline else None,
                resume="allow",
                reinit="create_new",  # several runs may be open in one process
                settings=wandb.Settings(
                    x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, console="off"
                ),
            )
        except Exception as error:  # those of its service are no wandb.Error
            raise LapError(
                f"W&B cannot be used ({_first_line(error)}); log in with `wandb login`, or set WANDB_MODE=offline"
            ) from None
        return WandBRun(opened, wandb)


class WandBRun(Session):
    def __init__(self, run: Any, wandb: Any) -> None:
        self._run, self._wandb = run, wandb

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # the server drops steps that it already has

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        self._run.summary.update({**values, "eval/step": step})  # W&B's history accepts no earlier step

    def text(self, name: str, text: str, step: int) -> None:
        self._run.summary[name] = text

    def image(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._wandb.Image(str(file))})  # without a step: an earlier one would be dropped

    def close(self) -> None:
        try:
            self._run.finish()
        except Exception as error:  # nothing is recorded as sent, so that the next session sends it again
            raise LapError(f"W&B did not finish ({_first_line(error)}); `lap track` sends the rest") from None


@cache
def _leave_inherited_service() -> None:
    """Let this process start a W&B service of its own, once: one that another process started would outlive a kill of
    ours, and refuse the run's id to the next session until it notices."""
    os.environ.pop("WANDB_SERVICE", None)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _folder(run: Run) -> Path:
    return run.path / "track" / "wandb"
