"""Searches that run: killed and finished, shared by two processes, pruned and resumed, without a result."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from search_support import infos, quick_recipe, spec_of, start_search, trained_steps, trials_of
from support import lap, start_lap, train_here

from lapcli.recipe import load_recipe
from lapcli.runs import update_run_info
from lapcli.runtime.errors import LapError
from lapcli.search.proposals import propose
from lapcli.search.result import confirmation_cells
from lapcli.search.runner import SearchRunner, refuse_without_result
from lapcli.search.trials import CONTROL, SEARCH, create, known_trials
from lapcli.sweep.grid import Cell
from lapcli.sweep.state import lock_cell

#: Long enough to be stopped: a trial that ends before the search has looked at it is finished.
LONG = {"train": {"steps": 300}, "validation": {"every": 20, "prompts": []}, "checkpoint": {"every": 20}}
LESS = {"train": {"steps": 200}, "validation": {"every": 100, "prompts": []}, "checkpoint": {"every": 100}}


class _Refused:
    """A process that ends at once without having done anything."""

    def __init__(self, *arguments):
        pass

    def poll(self):
        return 2


def results(spec, runs):
    """What a search came to, whoever did it and however often it was killed."""
    return {
        trial.name: (trial.params, trial.state, trial.value)
        for trials in trials_of(spec, runs).values()
        for trial in trials
    }


@pytest.mark.long
def test_killed_twice_and_finished_it_is_the_search_that_nobody_disturbed(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path)
    settings = {"trials": 2, "confirmations": 1, "pruner": "none"}
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    assert start_search(recipe, calm, shared_cache, **settings).code() == 0
    for name, step in (("s-c000", 2), ("s-t001", 5)):
        search = start_search(recipe, runs, shared_cache, **settings)
        search.wait_for(lambda name=name, step=step: any(s >= step for s in trained_steps(runs / name)))
        search.send(signal.SIGKILL)
        search.code()
    again = start_search(recipe, runs, shared_cache, **settings)
    assert again.code() == 0, again.told
    spec = spec_of(recipe, **settings)
    assert results(spec, runs) == results(spec, calm)
    for name, info in infos(runs).items():
        steps = trained_steps(runs / name)
        assert steps == list(range(1, len(steps) + 1)), "each step once"
        if info["status"] == "finished":
            assert info["weights_sha256"] == infos(calm)[name]["weights_sha256"]
    assert set(infos(runs)) == set(infos(calm))
    end = start_search(recipe, runs, shared_cache, **settings)
    assert end.code() == 0
    assert end.told == "", "all of it is finished"


def is_free(spec, runs, name):
    """Whether nobody trains that run: its process holds the lock of the trial for as long as it lives."""
    lock = lock_cell(Cell(name, spec.space.recipe, (), {}, spec.space.base), runs)
    if lock is not None:
        lock.close()
    return lock is not None


@pytest.mark.long
def test_a_signal_in_the_middle_of_a_trial_saves_it_and_the_same_command_resumes_it(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, **LESS)
    settings = {"trials": 1, "confirmations": 1, "pruner": "none"}
    spec = spec_of(recipe, **settings)
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    assert start_search(recipe, calm, shared_cache, **settings).code() == 0
    confirmation = next(name for name in infos(calm) if name.endswith("-seed1"))
    for name, kind in (("s-c000", signal.SIGTERM), ("s-t000", signal.SIGINT), (confirmation, signal.SIGTERM)):
        search = start_search(recipe, runs, shared_cache, **settings)
        search.wait_for(lambda name=name: any(step >= 5 for step in trained_steps(runs / name)))
        search.send(kind)
        assert search.code() == 75, search.told
        assert f"{kind.name}: the running trial finishes its step and saves" in search.told
        assert "Run the same command to resume" in search.told
        info = infos(runs)[name]
        assert (info["status"], info.get("pruned")) == ("interrupted", None)
        assert 5 <= info["step"] < 200
        assert info["step"] == trained_steps(runs / name)[-1], "saved where it was stopped"
        assert all(is_free(spec, runs, run) for run in infos(runs)), "nothing trains on"
    again = start_search(recipe, runs, shared_cache, **settings)
    assert again.code() == 0, again.told
    assert results(spec, runs) == results(spec, calm)
    for name, info in infos(runs).items():
        assert info["weights_sha256"] == infos(calm)[name]["weights_sha256"]
        assert trained_steps(runs / name) == list(range(1, 201)), "each step once"
    assert set(infos(runs)) == set(infos(calm))


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the trial's process in /proc")
def test_a_second_signal_ends_the_trial_at_once(tmp_path, shared_cache):
    """The command itself, with a trial that does not answer: it is ended all the same, and keeps what it had saved."""
    recipe = quick_recipe(tmp_path, train={"steps": 3000}, checkpoint={"every": 20})
    runs = tmp_path / "runs"
    arguments = ["search", str(recipe), "--over", "model.laplacian_heads={linear: [0, 4]}", "--trials", "1"]
    command = start_lap(*arguments, "--confirm", "0", "--name", "s", "--runs-dir", str(runs), cache=shared_cache)
    command.wait_for(lambda: any(step >= 25 for step in trained_steps(runs / "s-c000")))
    searching = command.child.pid
    (trial,) = map(int, Path(f"/proc/{searching}/task/{searching}/children").read_text().split())
    os.kill(trial, signal.SIGSTOP)
    command.send(signal.SIGINT)
    command.wait_for(lambda: "the running trial finishes its step and saves" in command.files[2].read_text())
    command.send(signal.SIGINT)
    assert command.result().returncode == 130
    assert is_free(spec_of(recipe), runs, "s-c000"), "nothing trains on"
    assert not Path(f"/proc/{trial}").exists()
    assert trials_of(spec_of(recipe, over={"model.laplacian_heads": [{"linear": [0, 4]}]}), runs)[CONTROL][0].step >= 20


def proposed_again(spec, arm, trials, number):
    """Recompute the proposal of trial `number` from the trials known at that time; it equals the trial's parameters."""
    by_number = {trial.number: trial for trial in trials}
    then = []
    for other, state, reports in by_number[number].told:
        trial = by_number[other]
        then.append(replace(trial, state=state, reports=trial.reports[:reports]))
    return propose(spec, arm, then)


@pytest.mark.long
def test_every_proposal_can_be_computed_again_from_the_run_directories(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, train={"steps": 4}, validation={"every": 2, "prompts": []})
    settings = {"trials": 7, "options": ["train.micro_batch=8"]}
    runs = tmp_path / "runs"
    assert start_search(recipe, runs, shared_cache, **settings).code() == 0
    spec = spec_of(recipe, **settings)
    trials = trials_of(spec, runs)
    assert len(trials[SEARCH]) == 7  # two of them after the five that are drawn at random
    for arm, own in trials.items():
        for trial in own:
            assert proposed_again(spec, arm, own, trial.number) == trial.params
    assert len({json.dumps(trial.params) for trial in trials[SEARCH]}) == 7
    # The control: none to all of the four heads, each once, plain first.
    assert trials[CONTROL][0].params["model.laplacian_heads.each"] == 0
    assert sorted(trial.params["model.laplacian_heads.each"] for trial in trials[CONTROL]) == [0, 1, 2, 3, 4]


@pytest.mark.long
def test_two_processes_share_a_search(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, train={"steps": 40})
    settings = {"trials": 3, "pruner": "none"}
    runs = tmp_path / "runs"
    both = [start_search(recipe, runs, shared_cache, **settings) for _ in range(2)]
    assert [search.code() for search in both] == [0, 0], [search.told for search in both]
    trained = [[line.split(":")[0] for line in search.told.splitlines() if ": training" in line] for search in both]
    assert sorted(trained[0] + trained[1]) == [f"s-{letter}00{n}" for letter in "ct" for n in range(3)]
    assert all(trained), "each of them trained something"
    for name, info in infos(runs).items():
        assert info["status"] == "finished"
        assert trained_steps(runs / name) == list(range(1, 41))


@pytest.mark.long
def test_a_pruned_trial_is_an_interrupted_run_that_can_be_resumed(tmp_path, shared_cache):
    """Learning rates that cannot compete are stopped at the first rung; the run is whole and goes on where it was."""
    recipe = quick_recipe(tmp_path, **LONG)
    over = {"optimizer.lr": [0.02, 1e-6, 2e-6, 3e-6]}
    settings = {"trials": 4, "over": over}
    runs = tmp_path / "runs"
    search = start_search(recipe, runs, shared_cache, **settings)
    assert search.code() == 0, search.told
    spec = spec_of(recipe, **settings)
    pruned = [trial for trial in trials_of(spec, runs)[SEARCH] if trial.state == "pruned"]
    assert pruned, search.told
    name = pruned[0].name
    info = infos(runs)[name]
    assert (info["status"], info["pruned"]) == ("interrupted", True)
    assert 20 <= info["step"] < 300
    resumed = train_here(load_recipe(runs / name / "recipe.yaml"), runs, name)
    assert resumed.is_finished
    assert "pruned" not in infos(runs)[name]
    alone = train_here(load_recipe(runs / name / "recipe.yaml"), tmp_path / "alone", name)
    assert alone.info["weights_sha256"] == resumed.info["weights_sha256"]
    again = next(trial for trial in trials_of(spec, runs)[SEARCH] if trial.name == name)
    assert (again.state, again.value is not None) == ("finished", True)


@pytest.mark.long
def test_a_trial_that_was_to_be_stopped_when_the_search_died_is_stopped_by_the_next(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, **LONG)
    settings = {"trials": 4, "over": {"optimizer.lr": [0.02, 1e-6, 2e-6, 3e-6]}}
    runs = tmp_path / "runs"
    assert start_search(recipe, runs, shared_cache, **settings).code() == 0
    spec = spec_of(recipe, **settings)
    pruned = next(trial for trial in trials_of(spec, runs)[SEARCH] if trial.state == "pruned")
    update_run_info(runs / pruned.name, pruned=False)
    steps = trained_steps(runs / pruned.name)
    again = start_search(recipe, runs, shared_cache, **settings)
    assert again.code() == 0
    assert infos(runs)[pruned.name]["pruned"] is True
    assert trained_steps(runs / pruned.name) == steps, "not a step more"


@pytest.mark.long
def test_the_budget_in_steps_is_the_same_for_both_arms(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path)
    runs = tmp_path / "runs"
    settings = {"trials": 5, "max_steps": 20, "pruner": "none"}
    search = start_search(recipe, runs, shared_cache, **settings)
    assert search.code() == 0, search.told
    trials = trials_of(spec_of(recipe, **settings), runs)
    assert {arm: [trial.step for trial in own] for arm, own in trials.items()} == {
        SEARCH: [12, 12],
        CONTROL: [12, 12],
    }


@pytest.mark.long
def test_a_budget_in_hours_is_measured_for_each_arm_and_a_larger_one_resumes_the_search(tmp_path, shared_cache):
    """No trial begins after the budget is used, one that has begun is finished, and none is trained twice."""
    recipe = quick_recipe(tmp_path)
    runs, calm = tmp_path / "runs", tmp_path / "calm"
    given = {"trials": 3, "pruner": "none"}
    spec = spec_of(recipe, **given)

    def search(hours):
        began = start_search(recipe, runs, shared_cache, max_hours=hours, **given)
        assert began.code() == 0, began.told
        return {arm: [trial.number for trial in own] for arm, own in trials_of(spec, runs).items()}, began.told

    found, told = search(1e-9)
    assert found == {SEARCH: [0], CONTROL: [0]}
    assert told.count(": training") == 2
    spent = {arm: own[0].seconds / 3600 for arm, own in trials_of(spec, runs).items()}
    assert all(hours > 0 for hours in spent.values())
    found, told = search(min(spent.values()) * (1 - 1e-9))
    assert found == {SEARCH: [0], CONTROL: [0]}, "either has used it"
    assert told == ""
    more = min(spent.values()) * (1 + 1e-9)
    arm = min(spent, key=spent.__getitem__)
    found, _ = search(more)
    assert found == {SEARCH: [0], CONTROL: [0], arm: [0, 1]}, "that arm had a moment left"
    outcome = SearchRunner(spec_of(recipe, **given, max_hours=more), runs, tell=print, start=_Refused).run()
    assert outcome.notes == [
        f"the {own} arm has used up --max-hours {more:g} after {len(found[own])} of 3 trials; "
        "raise the budget to resume it"
        for own in (SEARCH, CONTROL)
    ]
    found, told = search(1000.0)
    assert found == {SEARCH: [0, 1, 2], CONTROL: [0, 1, 2]}
    assert "000:" not in told, "finished trials stay as they are"
    assert start_search(recipe, calm, shared_cache, **given).code() == 0
    assert results(spec, runs) == results(spec, calm)
    for name, info in infos(runs).items():
        assert info["weights_sha256"] == infos(calm)[name]["weights_sha256"]


@pytest.mark.long
def test_all_trials_that_diverge_are_no_result(tmp_path):
    """A diverged trial is tried and not repeated; here its runs say so themselves."""
    recipe, runs = quick_recipe(tmp_path), tmp_path / "runs"
    spec = spec_of(recipe, trials=2)
    for arm in (SEARCH, CONTROL):
        for number in range(2):
            known = trials_of(spec, runs)[arm]
            cell = spec.cell(arm, number, propose(spec, arm, known))
            create(spec, runs, cell, arm, number, known_trials(known))
            update_run_info(runs / cell.name, status="failed", failure="the loss is nan", diverged=True)
    outcome = SearchRunner(spec, runs, tell=print, start=_Refused).run()
    assert outcome.confirmation is None
    with pytest.raises(LapError, match="all 2 trials of the search arm diverged; narrow the space"):
        refuse_without_result(outcome)


@pytest.mark.long
def test_no_trial_is_finished_where_the_data_is_missing(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path)
    runs = tmp_path / "runs"
    settings = {"trials": 1, "options": [f"data.train={tmp_path}/no.txt"]}
    search = start_search(recipe, runs, shared_cache, **settings)
    assert search.code() == 0, search.told
    assert "s-t000: failed" in search.told
    spec = spec_of(recipe, **settings)
    outcome = SearchRunner(spec, runs, tell=lambda text: None, start=_Refused).run()
    with pytest.raises(LapError, match="no trial of the search arm has finished"):
        refuse_without_result(outcome)


def test_confirmations_have_fresh_seeds_and_are_results(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path)
    runs = tmp_path / "runs"
    settings = {"trials": 2, "confirmations": 2}
    assert start_search(recipe, runs, shared_cache, **settings).code() == 0
    spec = spec_of(recipe, **settings)
    outcome = SearchRunner(spec, runs, tell=lambda text: None).run()
    confirmation = outcome.confirmation
    assert confirmation is not None
    if not confirmation.is_same:
        pairs = confirmation_cells(spec, (confirmation.winner, confirmation.control))
        assert [[cell.loaded.seed for cell in pair] for pair in pairs] == [[1, 1], [2, 2]]
        for pair in pairs:
            for cell in pair:
                assert infos(runs)[cell.name]["status"] == "finished"
                assert not (runs / cell.name / "search.json").exists()
        ours, theirs = confirmation.values[SEARCH], confirmation.values[CONTROL]
        assert confirmation.paired.difference == pytest.approx(sum(ours[s] - theirs[s] for s in ("1", "2")) / 2)
    assert all((runs / name / "sweep.json").exists() for name in ("s-t000", "s-c000")), "trials are no results"


def test_the_command_from_its_start_to_its_files(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, train={"steps": 3}, validation={"every": 3, "prompts": []})
    runs = tmp_path / "runs"
    arguments = ["search", str(recipe), "--over", "model.laplacian_heads={linear: [0, 4]}", "--trials", "1"]
    arguments += ["--confirm", "0", "--runs-dir", str(runs)]
    first = lap(*arguments, cache=shared_cache)
    assert first.returncode == 0, first.stderr
    assert "no trial is stopped early" in first.stderr
    assert "tiny-search-t000: training" in first.stderr
    assert "Not confirmed" in first.stdout
    folder = runs / "tiny-search.search"
    winner = load_recipe(folder / "winner.yaml")
    assert winner.model.laplacian_heads.startswith("linear(")
    assert (folder / "trials.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "trials.csv").read_text().startswith("trial,arm,state")
    again = lap(*arguments, "--json", cache=shared_cache)
    assert again.returncode == 0, again.stderr
    assert "training" not in again.stderr
    assert {trial["state"] for trial in json.loads(again.stdout)["trials"]} == {"finished"}
