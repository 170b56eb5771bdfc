"""`lap init`: write a commented starter recipe."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap init my_gpt
  lap init my_images --job images
  lap init my_images --job images --data ~/photographs
  lap init my_assistant --job chat
"""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="NAME", help="Folder to write to; also names the recipe and its run.")
    ],
    job: Annotated[
        Literal["text", "images", "chat", "self-supervised"], typer.Option("--job", help="What to train.")
    ] = "text",
    data: Annotated[
        Path | None,
        typer.Option("--data", help="With --job images: a folder of images by class, to which the recipe is fitted."),
    ] = None,
) -> None:
    """Write a commented starter recipe, and print what to run next. Nothing is overwritten."""
    from lapcli.recipe.shipped import write_starter

    values = None
    if data is not None:
        if job != "images":
            raise UsageError(f"--data is only for --job images; for {job}, set data.train in the recipe")
        from lapcli.data.images.sources import first_values

        values = first_values(data)
    written = write_starter(job, folder, values)
    for file, _ in written:
        print(file)
    print("Next:")
    for _, command in written:
        print(f"  {command}")
