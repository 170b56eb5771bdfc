"""The trackers, one file each. Their packages are extras, imported when a run is sent to them."""

from collections.abc import Callable
from typing import Literal

from lapcli.runtime.errors import UsageError
from lapcli.tracking.tracker import Tracker
from lapcli.tracking.trackers.tensorboard import TensorBoard
from lapcli.tracking.trackers.trackio import Trackio
from lapcli.tracking.trackers.wandb import WandB

__all__ = ["TensorBoard", "Trackio", "WandB", "tracker_of"]

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
