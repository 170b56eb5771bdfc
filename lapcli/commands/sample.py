"""`lap sample`: continue a text, or answer a question, with a run's model."""

import json
import sys
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap sample --prompt "The list type"
  lap sample quickstart --prompt "The list type" --samples 3 --temperature 0.7
  lap sample quickstart-sft --prompt "Spell this word: method" --temperature 0
  lap sample quickstart --prompt "def" --prompt "class" --json
"""


def sample(
    run: options.Run = None,
    run_option: options.RunOption = None,
    *,
    prompt: Annotated[list[str], typer.Option("--prompt", help="Text to continue, or question; repeatable.")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of each prompt.")] = 1,
    temperature: options.Temperature = 0.8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest sample, in tokens.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    checkpoint: options.Checkpoint = "last",
    runs_dir: options.RunsDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Lines, one object per prompt.")] = False,
) -> None:
    """Continue a text with a GPT, or ask a chat model one question. Same prompt and seed, same samples."""
    from lapcli.recipe import OBJECTIVES
    from lapcli.recipe.schema import CHAT, LANGUAGE
    from lapcli.runs import named_run, newest_run

    folder = runs_dir or default_runs_dir()
    run = options.one_run(run, run_option)
    kinds = {name for name in OBJECTIVES if LANGUAGE in OBJECTIVES[name].gives}
    if not all(text.strip() for text in prompt):
        raise UsageError("--prompt is empty; give some text to continue")
    chosen = newest_run(folder, kinds) if run is None else named_run(folder, run)
    if chosen.recipe.objective not in kinds:
        raise UsageError(
            f"{chosen.path} is a run of {chosen.recipe.objective}, which generates no text; name another with --run"
        )

    from lapcli.runtime.progress import say_start

    say_start(f"{chosen.path}: loading torch and the model")

    from lapcli.generation import dialogue
    from lapcli.generation.engine import Engine, Sampling
    from lapcli.objectives.weights import find_checkpoint, open_run

    weights = find_checkpoint(chosen, checkpoint)
    loaded = open_run(chosen, weights)
    print(f"{chosen.path}, step {weights.step}, weights sha256 {weights.weights_sha256}", file=sys.stderr)
    model, tokenizer = loaded.language_model()
    is_chat = CHAT in OBJECTIVES[chosen.recipe.objective].gives
    # One row at a time, so that a sample is complete before the next begins.
    engine = Engine(model, tokenizer, batch=1, uses_tools=is_chat)
    sampling = Sampling(max_tokens, temperature, options.TOP_K, seed)
    for question in prompt:
        texts = [""] * samples
        for number, text, is_last in dialogue.sample(engine, tokenizer, question, sampling, samples, is_chat=is_chat):
            texts[number] += text
            if not as_json:
                print(text, end="", flush=True)
                if is_last:
                    print("\n---" if samples > 1 else "", flush=True)
        if as_json:
            print(json.dumps({"prompt": question, "samples": texts}), flush=True)
