"""The trackers, one file each. Their packages are extras, imported when a run is sent to them."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

from lapcli.runtime.errors import UsageError
from lapcli.tracking.trackers.tensorboard import TensorBoard
from lapcli.tracking.trackers.tracker import Session, Tracker, missing_package, run_id
from lapcli.tracking.trackers.trackio import Trackio
from lapcli.tracking.trackers.wandb import WandB

__all__ = ["Session", "TensorBoard", "Tracker", "Trackio", "WandB", "check_installed", "run_id", "tracker_of"]

TrackerName = Literal["tensorboard", "wandb", "trackio"]


def tracker_of(name: TrackerName, project: str | None = None, offline: bool = False) -> Tracker:
    """Return the tracker with its options; UsageError for an option that it does not have."""
    if offline and name != "wandb":
        raise UsageError(f"--offline is an option of --to wandb; leave it out for {name}, which sends nothing anyway")
    if project is not None and name == "tensorboard":
        raise UsageError("--project is an option of --to wandb and --to trackio; leave it out for tensorboard")
    if project is not None and not project.strip():
        raise UsageError("--project is empty; give a name, or leave it out for lap")
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": lambda: WandB(project, offline),
        "trackio": lambda: Trackio(project or "lap"),
    }
    return makers[name]()


def check_installed(name: str) -> None:
    """Raise UsageError if the package of a tracker is not installed; nothing is imported."""
    if find_spec(name) is None:
        raise missing_package(name)
