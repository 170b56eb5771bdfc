"""`lap import`: import a checkpoint of nanochat as a finished run."""

from pathlib import Path
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir

EXAMPLES = """\b
Examples:
  lap import ~/.cache/nanochat/base_checkpoints/d20 --to d20
  lap import model_000700.pt --to d20-sft
  lap sft recipes/chat561m.yaml --run d20
"""


def import_(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A model_*.pt of nanochat, or its folder (the last step).")
    ],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="Name of the run.")],
    runs_dir: options.RunsDir = None,
) -> None:
    """Import a nanochat checkpoint of late 2025, or of the author's fork, as a finished run.

    Its tokenizer is read from beside the checkpoint or from nanochat's own folder.
    """
    from lapcli.runs import check_name

    check_name(to, "name another with --to")

    from lapcli.objectives.nanochat import import_checkpoint

    where = runs_dir or default_runs_dir()
    run, is_new = import_checkpoint(checkpoint.expanduser(), where, to)
    model = run.recipe.model  # type: ignore[attr-defined]
    state = "is finished" if is_new else "was imported before"
    print(f"{run.path} {state}: step {run.info['step']:,}, weights sha256 {run.info['weights_sha256'][:16]}")
    print(
        f"  {run.recipe.objective}, {model.layers} layers of width {model.width}, {model.heads} heads, "
        f"laplacian_heads {model.head_plan()}, rotary tables in bf16"
    )
    folder = options.runs_dir_option(where)
    is_chat = run.recipe.objective == "chat"
    following = f"chat --run {run.name}" if is_chat else f"sample --run {run.name} --prompt 'Once upon a time'"
    print(f"\nNext:\n  lap {following}{folder}\n  lap analyze all {run.name} --data FILE{folder}")
