"""What a file is known by in the cache's keys, without reading all of it."""

import hashlib
from pathlib import Path

# Of each end. A parquet file's end describes all its columns; hashing 100 GB at every start would take minutes.
HASHED_BYTES = 1 << 16


def local_fingerprint(path: Path) -> list[str | int]:
    """Size, modification time and both ends: an edit in place changes at least one of them."""
    status = path.stat()
    content = hashlib.sha256()
    with path.open("rb") as file:
        content.update(file.read(HASHED_BYTES))
        file.seek(max(status.st_size - HASHED_BYTES, 0))
        content.update(file.read(HASHED_BYTES))
    return [status.st_size, status.st_mtime_ns, content.hexdigest()]


def hub_fingerprint(path: Path) -> list[str | int]:
    """The hub's own content hash. Its cache names blobs by it and links to them, so it is known without the network."""
    if path.is_symlink():
        return [path.resolve().name, path.stat().st_size]
    return local_fingerprint(path)  # a file system without links holds copies
