"""A trial is created whole: its record and its mark are there from the moment it has its name."""

import os
import signal
import sys
from pathlib import Path

from search_support import quick_recipe, spec_of
from support import HANG, _end_with_the_tests, process

from lapcli.report.collect import collect
from lapcli.search.proposals import propose
from lapcli.search.trials import SEARCH, create


def _create_and_be_killed(recipe: str, runs: str) -> None:
    """Ends at the first call to the system after the trial got its name."""
    _end_with_the_tests()
    spec = spec_of(Path(recipe))
    cell = spec.cell(SEARCH, 0, propose(spec, SEARCH, []))

    def kill(event: str, arguments: object) -> None:
        if event != "os.kill" and os.access(Path(runs) / cell.name / "run.json", os.F_OK):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    create(spec, Path(runs), cell, SEARCH, 0, [])


def test_a_trial_killed_as_soon_as_it_has_its_name_is_no_result(tmp_path):
    recipe, runs = quick_recipe(tmp_path), tmp_path / "runs"
    child = process(_create_and_be_killed, str(recipe), str(runs))
    child.start()
    child.join(HANG)
    assert child.exitcode == -signal.SIGKILL
    (trial,) = collect([], runs).runs
    assert trial.is_search
