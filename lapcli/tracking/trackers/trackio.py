"""trackio: a local store in TRACKIO_DIR (by default in the Hugging Face cache); `trackio show` displays it.

Nothing leaves the machine: sending to a space or a server is left to trackio's own commands (`trackio sync`).
"""

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lapcli.runs import Run
from lapcli.tracking.tracker import Session, Tracker, config_of, missing_package, run_id

#: Variables that make trackio send data elsewhere.
_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")


class Trackio(Tracker):
    """trackio finds a run by its name. A part of our id makes it unique, because a new run may reuse an old name."""

    name = "trackio"

    def __init__(self, project: str = "lap") -> None:
        self._project = project

    def remove_unrecorded(self, run: Run, pieces: Sequence[str]) -> bool:
        """Remove the whole run, because trackio cannot remove less; all steps have to be sent again."""
        for stored in self._stored(run):
            stored.delete()
        return False

    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session:
        trackio = _import(self.name)
        names = [stored.name for stored in self._stored(run)]
        with _quiet():
            opened = trackio.init(
                project=self._project,
                name=names[0] if names else f"{run.name}{_suffix(run)}",
                config=config_of(recipe),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        return TrackioRun(opened, trackio)

    def _stored(self, run: Run) -> list[Any]:
        """Find the run in trackio's store; it keeps the name under which it was first sent."""
        try:
            in_project = list(_import(self.name).Api().runs(self._project))
        except ValueError:  # no such project yet
            return []
        return [stored for stored in in_project if stored.name.endswith(_suffix(run))]


class TrackioRun(Session):
    def __init__(self, run: Any, trackio: Any) -> None:
        self._run, self._trackio = run, trackio

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        self.scalars(step, values)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def image(self, name: str, file: Path, step: int) -> None:
        self._run.log({name: self._trackio.Image(str(file))}, step=step)

    def close(self) -> None:
        with _quiet():
            self._run.finish()


def _suffix(run: Run) -> str:
    return f"-{run_id(run)[:8]}"


def _import(name: str) -> Any:
    """Import trackio, after changing the environment so that nothing is sent and the hub is not asked for the user's
    name."""
    for variable in _REMOTE:
        os.environ.pop(variable, None)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import trackio
    except ImportError:
        raise missing_package(name) from None
    return trackio


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide trackio's prints, because stdout is for our own output."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
