"""Contents of trackers, read back from their own files: {tag: [(step, value), ...]} in the order of writing."""

import json
import struct


def tensorboard_scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(path / "tensorboard"), {"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wandb_scalars(path):
    """All offline folders of one W&B run together."""
    history, files = {}, set()
    for folder in sorted((path / "track" / "wandb").glob("offline-run-*")):
        (file,) = folder.glob("*.wandb")
        files.add(file.name)
        for record in _wandb_records(file.read_bytes()):
            for item in record.history.item:
                (tag,) = item.nested_key
                if not tag.startswith("_"):
                    history.setdefault(tag, []).append((record.history.step.num, json.loads(item.value_json)))
    assert len(files) <= 1, files
    return history


def _wandb_records(data):
    """The records of a LevelDB log: blocks of 32 KiB, in which a record may span several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, content = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or its last part
            record = Record()
            record.ParseFromString(content)
            content = b""
            yield record
