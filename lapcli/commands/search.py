"""`lap search RECIPE --over KEY=DOMAIN`: search head plans and other recipe values, and compare with a control."""

from itertools import chain
from typing import Annotated

import typer

from lapcli.commands import options
from lapcli.commands.options import table
from lapcli.runtime.environment import require_extra
from lapcli.runtime.environment import runs_dir as default_runs_dir

EXAMPLES = """\b
Examples:
  lap search recipes/vit_digits.yaml --over 'model.laplacian_heads={per_layer: [0, 4]}' --metric validation_top1
  lap search recipes/quickstart.yaml --over 'model.laplacian_heads={linear: [0, 4]}' --trials 30 --name slopes
"""


def search(
    recipe: options.Recipe,
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="KEY=DOMAIN",
            help="A,B (choices), {from: 1e-3, to: 1e-1, log: true}, or a head plan: {per_layer: [0, 4]}, "
            "{linear: [0, 4]}; repeatable.",
        ),
    ],
    trials: Annotated[int, typer.Option("--trials", min=1, max=100_000, help="Maximum number of trials per arm.")] = 20,
    metric: Annotated[str, typer.Option("--metric", help="Validation metric to optimise.")] = "validation_loss",
    confirm: Annotated[
        int, typer.Option("--confirm", min=0, max=1000, help="Fresh seeds for comparing winner and control.")
    ] = 3,
    jobs: options.Jobs = None,
    set_: options.Set = None,
    data: options.Data = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Prefix of the runs' names.", show_default="RECIPE-search")
    ] = None,
    runs_dir: options.RunsDir = None,
    nproc: options.Nproc = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the search space of both arms.")] = False,
) -> None:
    """Search head plans and other recipe values with Optuna; `lap sweep` trains every cell of a grid instead.

    Trials are ordinary runs. A control arm, with the same number of Laplacian heads in every layer or none, gets the
    same budget. The winner counts as better only if it beats the control on fresh seeds. The same command resumes a
    search, and several processes can share one.
    """
    from lapcli.experiments.cells import parse_over
    from lapcli.experiments.runner import Chooser, Runner, failure, share_machine
    from lapcli.experiments.search import Search, Settings, read_space
    from lapcli.runs import check_name
    from lapcli.runtime.progress import LogConsole

    require_extra("optuna", "search")
    own_name = name or f"{recipe.stem}-search"
    check_name(own_name)
    read = read_space(recipe, parse_over(over), options.overrides(set_, data))
    settings = Settings(own_name, read, metric, trials, confirm)
    _ = settings.direction  # an unknown metric is refused before anything is shown or started
    where, console = runs_dir or default_runs_dir(), LogConsole()
    tell = console.print
    if dry_run:
        arms = {"search": read, "control": read.control()}
        domains = {arm: {key: str(each) for key, each in space.distributions.items()} for arm, space in arms.items()}
        rows = [(arm, key, text) for arm in domains for key, text in domains[arm].items()]
        print(table(("arm", "parameter", "domain"), rows))
        return
    found, slots = Search(settings, where), share_machine(jobs or 1)[0]
    statuses = Runner(found, where, slots, nproc=nproc, tell=tell, console=console).run()
    cells = found.confirmation()
    statuses += Runner(
        Chooser([*chain(*cells.values())], where), where, slots, nproc=nproc, tell=tell, console=console
    ).run()
    result = found.result(cells)
    shown = [
        (row["trial"], row["state"], "-" if row["value"] is None else f"{row['value']:.4f}", str(row["values"]))
        for row in result["trials"]
    ]
    print(table(("trial", "state", metric, "values"), shown))
    print("\n".join([result["verdict"], "The result was written to", *(f"  {path}" for path in result["files"])]))
    if error := failure(statuses):
        raise error
