"""`lap chat`: talk to a chat run in the terminal."""

from typing import Annotated

import typer

from lapcli.commands import options

EXAMPLES = """\b
Examples:
  lap chat
  lap chat --run quickstart-sft --temperature 0
  lap chat --prompt "How many r are in strawberry?"
"""


def chat(
    run: Annotated[str | None, typer.Option("--run", help="Chat run; by default the newest finished one.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this alone, on stdout.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=100, help="0: the likeliest.")] = 0.6,
    top_k: Annotated[int, typer.Option("--top-k", min=1, help="Tokens to choose among.")] = 50,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.")] = 0,
    runs_dir: options.RunsDir = None,
) -> None:
    """Talk to a fine-tuned model. /clear forgets the conversation, /quit leaves, Ctrl-C stops an answer."""
    import sys

    from lapcli.runs import find_run
    from lapcli.runtime.environment import runs_dir as default_runs_dir

    found = find_run(runs_dir or default_runs_dir(), run, {"chat"})

    import torch

    from lapcli.generation.dialogue import Dialogue, converse
    from lapcli.generation.sampling import Sampling
    from lapcli.kinds.opening import find_checkpoint, open_run
    from lapcli.runtime.ranks import pick_device

    device = torch.device(pick_device(found.recipe.train.device))
    loaded = open_run(found, find_checkpoint(found, "last"), device)
    model, tokenizer = loaded.language_model()
    print(f"{found.path}, weights sha256 {str(loaded.weights_sha256)[:16]}", file=sys.stderr)
    dialogue = Dialogue(model, tokenizer, Sampling(max_tokens, temperature, top_k, seed))
    if prompt is not None:
        for text in dialogue.answer(prompt):
            print(text, end="", flush=True)
        print()
        return
    if sys.stdin.isatty():
        print("Ask something. /clear forgets the conversation, /quit leaves, Ctrl-C stops an answer.", file=sys.stderr)
    converse(dialogue)
