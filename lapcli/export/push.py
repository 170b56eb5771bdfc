"""Uploads an exported folder to the model hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.utils import HFValidationError, validate_repo_id

from lapcli.export.card import CARD
from lapcli.export.export import RECORD
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, LapError, UsageError
from lapcli.runtime.files import read_json, sha256_of_file


@dataclass(frozen=True)
class Upload:
    folder: Path
    repository: str
    files: dict[str, int]  # bytes of each
    record: dict[str, Any]
    is_private: bool


def plan_upload(folder: Path, repository: str, *, private: bool = True) -> Upload:
    """List what would be sent; refuse a folder that was changed after the export or failed its verification."""
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UsageError(f"--to takes OWNER/NAME, got {repository[:80]!r}") from None
    if repository.count("/") != 1:
        raise UsageError(f"--to takes OWNER/NAME, got {repository[:80]!r}")
    again = "export the run again"
    try:
        record = read_json(folder / RECORD, again)
    except OSError:
        raise UsageError(f"{folder} is not an exported folder: it has no {RECORD}; make one with lap export") from None
    expected = {*record["files"], RECORD, CARD}
    present = {path.name: path for path in folder.iterdir()}
    if unexpected := sorted(present.keys() - expected):
        raise UsageError(f"{folder / unexpected[0]} was not written by lap export; move it away, then push again")
    for name, sha256 in record["files"].items():
        if name not in present or sha256_of_file(present[name]) != sha256:
            raise DataError(f"{folder / name} is missing or was changed after the export; {again}")
    if record["verified"] is False:
        raise UsageError(f"{folder} failed its verification and is not uploaded; {again}")
    sizes = {name: path.stat().st_size for name, path in sorted(present.items())}
    return Upload(folder, repository, sizes, record, private)


def upload_folder(upload: Upload) -> str:
    """Create the repository if it does not exist and upload all files in one commit; return its address."""
    if hub_is_offline():
        raise UsageError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it first")
    api = HfApi()
    try:
        api.create_repo(upload.repository, private=upload.is_private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=upload.repository,
            folder_path=upload.folder,
            allow_patterns=list(upload.files),
            commit_message=f"{upload.record['run']}, step {upload.record['step']}",
        )
    except Exception as error:  # any error of the connection or the hub
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise LapError(
            f"the upload to {upload.repository} failed ({reason[:200]}); log in with `hf auth login`"
        ) from None
    return str(commit.commit_url)
