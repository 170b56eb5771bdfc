"""Proposals from spaces in which some combinations are invalid, and what a waiting search reads."""

from collections import Counter

import pytest
from search_support import quick_recipe, spec_of, start_search, trials_of

from lapcli.runtime.errors import LapError
from lapcli.search.proposals import propose
from lapcli.search.runner import SearchRunner
from lapcli.search.trials import CONTROL, SEARCH, Trial

#: Each value is valid with the recipe's own width 48 and 4 heads; 6 heads do not divide a width of 32.
JOINT = {"model.width": [32, 48], "model.heads": [4, 6]}
VALID = {(32, 4), (48, 4), (48, 6)}


@pytest.fixture
def recipe(tmp_path):
    return quick_recipe(tmp_path, model={"width": 48, "heads": 4, "laplacian_heads": 2})


def values(params):
    return int(params["model.width"]), int(params["model.heads"])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_combination_that_is_invalid_together_is_skipped(recipe, seed, sampler):
    spec = spec_of(recipe, JOINT, seed=seed, sampler=sampler, trials=4)
    trials = []
    while (params := propose(spec, SEARCH, trials)) is not None:
        trials.append(Trial(f"s-t{len(trials):03d}", SEARCH, len(trials), params, "finished", value=1.0))
        assert len(trials) <= 4
    assert Counter(values(trial.params) for trial in trials) == Counter(VALID)


def test_a_plan_that_is_invalid_with_the_heads_is_skipped_in_the_control(recipe):
    spec = spec_of(recipe, {"model.laplacian_heads": [{"constant": [0, 4]}], "model.heads": [2, 4]}, trials=8)
    trials = []
    while (params := propose(spec, CONTROL, trials)) is not None:
        trials.append(Trial(f"s-c{len(trials):03d}", CONTROL, len(trials), params, "finished", value=1.0))
        assert len(trials) <= 8
    found = {
        (int(params["model.heads"]), params["model.laplacian_heads.each"]) for params in (t.params for t in trials)
    }
    assert found == {(2, k) for k in range(3)} | {(4, k) for k in range(5)}


class _Slow:
    """A process that fails after it was polled some times."""

    def __init__(self, *arguments):
        self.left = 6

    def poll(self):
        self.left -= 1
        return None if self.left > 0 else 1

    def send_signal(self, kind):
        pass


def test_a_search_over_such_a_space_ends_and_its_finished_trials_are_read_once(
    recipe, tmp_path, shared_cache, monkeypatch
):
    runs = tmp_path / "runs"
    settings = {"over": JOINT, "trials": 4, "confirmations": 0, "pruner": "none"}
    search = start_search(recipe, runs, shared_cache, **settings)
    assert search.code() == 0, search.told
    spec = spec_of(recipe, **{**settings, "over": JOINT})
    assert {values(trial.params) for trial in trials_of(spec, runs)[SEARCH]} == VALID
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    read = Counter()

    def counted(path):
        read[path.parent.name] += 1
        return read_metrics(path)

    from lapcli.search.trials import read_metrics

    monkeypatch.setattr("lapcli.search.trials.read_metrics", counted)
    # One that is not finished, so that the search has something to poll.
    (runs / "s-t002" / "summary.json").unlink()
    from lapcli.runs import update_run_info

    update_run_info(runs / "s-t002", status="interrupted")
    try:
        SearchRunner(spec, runs, tell=lambda text: None, start=_Slow).run()
    except LapError as error:
        pytest.fail(str(error))
    assert read.pop("s-t002") > 0
    assert set(read.values()) == {1}
