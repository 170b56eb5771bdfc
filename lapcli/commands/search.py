"""`lap search RECIPE --over KEY=DOMAIN`: search head plans and other recipe values, and compare with a control."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from lapcli.commands import options
from lapcli.runtime.environment import runs_dir as default_runs_dir
from lapcli.runtime.errors import UsageError

EXAMPLES = """\b
Examples:
  lap search recipes/vit_digits.yaml --over 'model.laplacian_heads={per_layer: [0, 4]}' --metric validation_top1
  lap search recipes/quickstart.yaml --over 'model.laplacian_heads={total: [0, 12]}' --trials 30 --max-hours 2
  lap search recipes/quickstart.yaml --space space.yaml --trials 50 --name plans
"""


def search(
    recipe: options.Recipe,
    space: Annotated[
        Path | None, typer.Option("--space", metavar="FILE", help="YAML file of keys with their domains.")
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            "--over",
            metavar="KEY=DOMAIN",
            help="A,B (choices), {from: 1e-3, to: 1e-1, log: true}, or a head plan: {per_layer: [0, 4]}, "
            "{total: [0, 16]}, {linear: [0, 4]}, {constant: [0, 4]}; repeatable.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, max=100_000, help="Trials of each arm, at most.")] = 20,
    metric: Annotated[str, typer.Option("--metric", help="Validation metric to optimise.")] = "validation_loss",
    max_steps: Annotated[
        int | None, typer.Option("--max-steps", min=1, help="Training steps per arm after which no trial is started.")
    ] = None,
    max_hours: Annotated[
        float | None,
        typer.Option("--max-hours", min=1e-6, help="Measured training hours per arm after which no trial is started."),
    ] = None,
    sampler: Annotated[Literal["tpe", "random"], typer.Option("--sampler", help="How trials are proposed.")] = "tpe",
    pruner: Annotated[
        Literal["halving", "none"], typer.Option("--pruner", help="Successive halving at validations, or none.")
    ] = "halving",
    confirm: Annotated[
        int,
        typer.Option(
            "--confirm", min=0, max=1000, help="Number of new seeds on which the winner is compared with the control."
        ),
    ] = 3,
    set_: options.Set = None,
    data: options.Data = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Prefix of the runs' names.", show_default="RECIPE-search")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Random seed of the proposals; the runs use the recipe's seed.")
    ] = 0,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the space and the first proposals.")] = False,
    as_json: options.Json = False,
) -> None:
    """Search head plans and other recipe values with Optuna; `lap sweep` trains every cell of a grid instead.

    Trials are ordinary runs. A control arm, with the same number of Laplacian heads in every layer or none, gets the
    same budget. The winner counts as better only if it beats the control on fresh seeds. The same command resumes a
    search, and several processes can share one.
    """
    from lapcli.runs import check_name
    from lapcli.runtime.progress import LogConsole
    from lapcli.search.proposals import check_installed, rung
    from lapcli.search.runner import SearchRunner, refuse_without_result
    from lapcli.search.trials import spec_from
    from lapcli.sweep.grid import parse_over

    check_installed()
    if (space is None) == (not over):
        raise UsageError("give the search space, either by --space FILE or by --over KEY=DOMAIN")
    own_name = name or f"{recipe.stem}-search"
    check_name(own_name)
    spec = spec_from(
        recipe,
        space if space is not None else parse_over(over or []),
        options.overrides(set_, data),
        name=own_name,
        metric=metric,
        seed=seed,
        trials=trials,
        sampler=sampler,
        pruner=pruner,
        confirmations=confirm,
        max_steps=max_steps,
        max_hours=max_hours,
    )
    if dry_run:
        from lapcli.search.result import describe

        print(describe(spec))
        return
    where = runs_dir or default_runs_dir()
    tell = LogConsole().print
    if pruner == "halving" and rung(spec) is None:
        tell("validation.every allows no validation before a trial's last step, so no trial is stopped early")
    outcome = SearchRunner(spec, where, tell=tell, nproc=nproc).run()

    from lapcli.search.result import as_data, table, write_result

    # Before a search without a result is refused: its trials are still worth reading.
    paths = write_result(spec, outcome, where)
    if as_json:
        print(json.dumps(as_data(spec, outcome), indent=2))
    else:
        print(table(spec, outcome))
    for note in outcome.notes:
        print(f"lap: {note}", file=sys.stderr)
    refuse_without_result(outcome)
    if not as_json:
        assert outcome.confirmation is not None
        confirmation = outcome.confirmation
        print(f"\nwinner   {confirmation.winner.name}, {metric} {confirmation.winner.value:.4f}")
        print(f"control  {confirmation.control.name}, {metric} {confirmation.control.value:.4f}")
        print(confirmation.verdict(metric))
        print("\n".join(["", "The result was written to", *(f"  {path}" for path in paths)]))
