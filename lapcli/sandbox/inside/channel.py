"""Messages between candidate and tests: JSON with its length in front, 8 MB at most."""

from __future__ import annotations

import json
import os
import struct

TYPE_CHECKING = False  # importing `typing` would cost as much as starting Python does
if TYPE_CHECKING:
    from typing import Any

LARGEST = 8 << 20  # bytes


class Closed(Exception):
    """The other side is gone."""


class TooLarge(Exception):
    """A message, or what claims to be one, beyond the limit."""


class Channel:
    """One end of the socket pair. Plain read and write: the filter allows nothing else on a socket."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode("ascii")
        if len(body) > LARGEST:
            raise TooLarge(f"a message of {len(body):,} bytes; at most {LARGEST:,}")
        rest = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> Any:
        (length,) = struct.unpack(">I", self._exactly(4))
        if length > LARGEST:
            raise TooLarge(f"a message of {length:,} bytes; at most {LARGEST:,}")
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = os.read(self._descriptor, min(count, 1 << 20))
            except ConnectionResetError as error:
                raise Closed from error
            if not part:
                raise Closed
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
