"""TensorBoard: event files in `runs/NAME/tensorboard/`; `tensorboard --logdir runs` shows all runs.

The events are written with TensorBoard's own classes, as torch's SummaryWriter does, but without importing torch: the
mirror of a run that is being trained is a process beside it, which should use few resources.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lapcli.runs import Run
from lapcli.tracking.tracker import Session, Tracker, missing_package, remove_other_pieces

_STRING = 7  # DT_STRING of TensorBoard's tensors
_RGB = 3


class TensorBoard(Tracker):
    name = "tensorboard"

    def pieces(self, run: Run) -> list[str]:
        return sorted(path.name for path in _folder(run).glob("events.*"))

    def remove_unrecorded(self, run: Run, pieces: Sequence[str]) -> bool:
        remove_other_pieces(_folder(run), self.pieces(run), pieces)
        return True

    def open(self, run: Run, recipe: Mapping[str, Any]) -> Session:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise missing_package(self.name) from None
        return EventFile(EventFileWriter(str(_folder(run)), flush_secs=5))


class EventFile(Session):
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._add(step, [{"tag": name, "simple_value": value} for name, value in values.items()])

    def scores(self, step: int, values: Mapping[str, float]) -> None:
        self.scalars(step, values)

    def text(self, name: str, text: str, step: int) -> None:
        tensor = {
            "dtype": _STRING,
            # The text panel renders Markdown; a fence keeps the indentation of YAML.
            "string_val": [f"```\n{text}\n```".encode()],
            "tensor_shape": {"dim": [{"size": 1}]},
        }
        metadata = {"plugin_data": {"plugin_name": "text"}}
        # The tag of torch's SummaryWriter.add_text.
        self._add(step, [{"tag": f"{name}/text_summary", "tensor": tensor, "metadata": metadata}])

    def image(self, name: str, file: Path, step: int) -> None:
        from PIL import Image

        with Image.open(file) as image:
            width, height = image.size
        encoded = {"encoded_image_string": file.read_bytes(), "width": width, "height": height, "colorspace": _RGB}
        self._add(step, [{"tag": name, "image": encoded}])

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, values: list[dict[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(**value) for value in values])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _folder(run: Run) -> Path:
    return run.path / "tensorboard"
