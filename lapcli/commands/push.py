"""`lap push`: upload an exported folder to the model hub."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  lap push runs/gpt561m_5L-sft/export/hf --to me/gpt561m-5L
  lap push runs/gpt561m_5L-sft/export/hf --to me/gpt561m-5L --yes
"""


def push(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `lap export` wrote.")],
    to: Annotated[str, typer.Option("--to", metavar="OWNER/NAME", help="Repository on the hub.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Send it; without this option, only print what would be sent.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; by default it is private.")
    ] = False,
) -> None:
    """Upload an exported folder to the model hub. Without --yes nothing is sent."""
    from lapcli.export.push import plan_upload, upload_folder

    upload = plan_upload(folder, to, private=not public)
    for name, size in upload.files.items():
        print(f"{name:<26}{size:>16,} bytes")
    kind = "private" if upload.is_private else "public"
    verified = "verified" if upload.record["verified"] else "not verified"
    print(f"{sum(upload.files.values()):,} bytes of {upload.record['run']}, {verified}, to {to} ({kind} if it is new)")
    print(upload_folder(upload) if yes else "nothing was sent; add --yes to send it")
