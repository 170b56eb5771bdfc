"""`lap chat`: talk to a chat run in the terminal."""

import sys
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap chat
  lap chat quickstart-sft --temperature 0
  lap chat < questions.txt
"""


def chat(
    run: options.Run = None,
    run_option: options.RunOption = None,
    temperature: options.Temperature = 0.6,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 256,
    runs_dir: options.RunsDir = None,
) -> None:
    """Talk to a fine-tuned model. /clear and /quit are commands; Ctrl-C stops an answer."""

    from lapcli.recipe import OBJECTIVES
    from lapcli.recipe.schema import CHAT
    from lapcli.runs import find_run, named_run

    run = options.one_run(run, run_option)
    folder, chats = runs_dir or default_runs_dir(), {name for name in OBJECTIVES if CHAT in OBJECTIVES[name].gives}
    if run is not None and (base := named_run(folder, run)).info.get("objective") not in chats:
        raise UsageError(
            f"{base.path} has not learned to answer; let it continue a text with `lap sample {run}`, or fine-tune it "
            f"with `lap sft chat_quickstart --run {run}`"
        )
    chat_run = find_run(folder, run, chats)
    from lapcli.runtime.progress import say_start

    say_start(f"{chat_run.path}: loading torch and the model")

    from lapcli.generation.dialogue import COMMANDS, Dialogue, converse
    from lapcli.generation.engine import Sampling
    from lapcli.objectives.weights import find_checkpoint, open_run

    loaded = open_run(chat_run, find_checkpoint(chat_run, "last"))
    model, tokenizer = loaded.language_model()
    print(f"{chat_run.path}, weights sha256 {str(loaded.weights_sha256)[:16]}", file=sys.stderr)
    dialogue = Dialogue(model, tokenizer, Sampling(max_tokens, temperature, options.TOP_K, 0))
    if sys.stdin.isatty():
        print(f"Ask something. {COMMANDS}, Ctrl-C stops an answer.", file=sys.stderr)
    converse(dialogue)
