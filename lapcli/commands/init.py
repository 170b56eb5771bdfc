"""`lap init`: write a commented recipe as the start of one's own."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.commands.options import print_json

EXAMPLES = """\b
Examples:
  lap init my_gpt
  lap init my_images --job images
  lap init my_assistant --job chat
"""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; created if it does not exist.")],
    job: Annotated[
        Literal["text", "images", "chat", "self-supervised"], typer.Option("--job", help="What to train.")
    ] = "text",
    as_json: options.Json = False,
) -> None:
    """Write a commented starter recipe, and print what to run next. Nothing is overwritten."""
    from lapcli.recipe.shipped import write_starter

    written = write_starter(job, folder)
    if as_json:
        print_json([{"file": str(file), "next": command} for file, command in written])
        return
    for file, _ in written:
        print(file)
    print("Next:")
    for _, command in written:
        print(f"  {command}")
