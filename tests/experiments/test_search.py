"""Running searches: killed and finished, and the criterion for better."""

import math
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats
from search_support import infos, quick_recipe, search_of, start_search, trained_steps
from support import run_main

from lapcli.experiments.search import verdict
from lapcli.recipe import load_recipe
from lapcli.runtime.errors import LapError, UsageError

HEADS = "model.laplacian_heads"
#: Each value is valid with the recipe's own width 48 and 4 heads; 6 heads do not divide a width of 32.
JOINT = {"model.width": [32, 48], "model.heads": [4, 6]}


def outcome(recipe, runs, **settings):
    """A search's results, without process ids and timing."""
    rows = search_of(recipe, runs, **settings).rows()
    return [(row["trial"], row["values"], row["state"], row["value"]) for row in rows]


def told(search, arm, cell, value):
    """Finish a trial without training, with the score `value`."""
    search.score = lambda _: value
    search.settled(cell, "finished")


def test_an_invalid_combination_is_a_failed_trial(tmp_path):
    recipe = quick_recipe(tmp_path, model={"width": 48, "heads": 4, "laplacian_heads": 2})
    search = search_of(recipe, tmp_path / "runs", over=JOINT, trials=9)
    while cells := search.next():
        told(search, "search", cells[0], 1.0)
    rows = [row for row in search.rows() if row["arm"] == "search"]
    found = {(row["values"]["model.width"], row["values"]["model.heads"]): row["state"] for row in rows}
    assert len(found) == len(rows)
    assert {values for values, state in found.items() if state == "finished"} == {(32, 4), (48, 4), (48, 6)}
    assert found.get((32, 6), "invalid") == "invalid"


def test_equal_results_give_equal_proposals_also_after_a_restart(tmp_path):
    recipe = quick_recipe(tmp_path)
    proposed = []
    for place, restarts in (("calm", False), ("killed", True)):
        search = search_of(recipe, tmp_path / place, trials=8)
        names = []
        while cells := search.next():
            (cell,) = cells
            if restarts:  # before the trial is told: the next start hands out the same one
                search = search_of(recipe, tmp_path / place, trials=8)
                assert search.next()[0].overrides == cell.overrides
            names.append((cell.name, cell.overrides))
            told(search, None, cell, float(len(cell.overrides[-1]) + len(names) % 3))
        proposed.append(names)
    assert proposed[0] == proposed[1]
    trials = [name for name, _ in proposed[0]]
    assert sum("-t" in name for name in trials) == 8
    assert sum("-c" in name for name in trials) == 5  # none to all of the four heads, each once


def test_another_search_under_the_same_name_is_refused(tmp_path):
    recipe = quick_recipe(tmp_path)
    search_of(recipe, tmp_path / "runs")
    with pytest.raises(UsageError, match="recipe"):
        search_of(recipe, tmp_path / "runs", options=["train.steps=20"])
    search_of(recipe, tmp_path / "runs", trials=9)  # more trials are the same search


def test_a_trial_without_a_finite_loss_diverged_and_is_never_best(tmp_path):
    search = search_of(quick_recipe(tmp_path), tmp_path / "runs", trials=1)
    for _ in range(2):
        (cell,) = search.next()
        told(search, None, cell, math.nan)
    assert {row["state"] for row in search.rows()} == {"diverged"}
    with pytest.raises(LapError, match="no trial of the search arm"):
        search.confirmation()


def test_the_winner_is_confirmed_on_unused_seeds(tmp_path):
    search = search_of(quick_recipe(tmp_path), tmp_path / "runs", trials=2, confirm=3)
    while cells := search.next():
        told(search, None, cells[0], 1.0 if "-t001" in cells[0].name else 2.0)
    cells = search.confirmation()
    assert [cell.name for cell in cells["search"]] == [f"s-winner001-seed{seed}" for seed in (1, 2, 3)]
    assert [cell.loaded.seed for cell in cells["control"]] == [1, 2, 3]
    assert not any(cell.is_search for own in cells.values() for cell in own)
    winner = search.best("search")
    assert cells["search"][0].loaded.model == search.spaces["search"].load(winner.params).model
    search.best = lambda arm: SimpleNamespace(number=0, params=SAME[arm])
    assert search.confirmation() == {}, "the same plan in two notations"


SAME = {"search": {f"{HEADS}.layer0": 2, f"{HEADS}.layer1": 2}, "control": {HEADS: 2}}


@pytest.mark.parametrize(
    ("winner", "control", "word"),
    [
        ([2.10, 2.20, 2.31], [2.15, 2.25, 2.35], "Better"),
        ([2.15, 2.25, 2.35], [2.10, 2.20, 2.31], "Worse"),
        ([2.10, 2.30, 2.31], [2.15, 2.25, 2.35], "Not better"),
        ([2.0], [3.0], "Not confirmed"),
        ([], [3.0], "Not confirmed"),
    ],
)
def test_the_verdict_follows_the_interval_of_the_paired_test(winner, control, word):
    """The values are losses; as scores, where more is better, the first two verdicts are swapped."""
    values = [dict(enumerate(each)) for each in (winner, control)]
    loss, score = (verdict(*values, "m", direction) for direction in ("lower", "higher"))
    assert loss["verdict"].startswith(f"{word}: ")
    assert score["verdict"].startswith(f"{ {'Better': 'Worse', 'Worse': 'Better'}.get(word, word) }: ")
    assert loss["better"] == (word == "Better")
    if len(winner) > 1:
        interval = np.array(stats.ttest_rel(winner, control).confidence_interval(0.95))
        assert loss["interval"] == pytest.approx(interval.tolist())


@pytest.mark.long
def test_a_killed_and_resumed_search_matches_an_uninterrupted_one(tmp_path, shared_cache):
    recipe = quick_recipe(tmp_path, train={"steps": 60}, validation={"every": 60, "prompts": []})
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    assert start_search(recipe, calm, shared_cache, trials=2).code() == 0
    for name, step, kind, code in (
        ("s-c000", 2, signal.SIGKILL, -9),
        ("s-t001", 5, signal.SIGKILL, -9),
        ("s-t001", 20, signal.SIGINT, 75),
    ):
        search = start_search(recipe, runs, shared_cache, trials=2)
        search.wait_for(lambda name=name, step=step: any(s >= step for s in trained_steps(runs / name)))
        search.send(kind)
        assert search.code() == code, search.told
    assert "Run the same command" in search.told
    assert infos(runs)["s-t001"]["status"] == "interrupted"
    assert start_search(recipe, runs, shared_cache, trials=2).code() == 0
    assert outcome(recipe, runs, trials=2) == outcome(recipe, calm, trials=2)
    for name, info in infos(runs).items():
        assert trained_steps(runs / name) == list(range(1, 61)), "each step once"
        assert info["weights_sha256"] == infos(calm)[name]["weights_sha256"]
    end = start_search(recipe, runs, shared_cache, trials=2)
    assert (end.code(), end.told) == (0, ""), "all of it is finished"


@pytest.mark.slow
def test_the_search_command(tmp_path, capsys):
    recipe = quick_recipe(tmp_path, train={"steps": 2}, validation={"every": 2, "prompts": []})
    words = ["search", str(recipe), "--over", f"{HEADS}={{linear: [0, 4]}}", "--trials", "1", "--confirm", "0"]
    words += ["--name", "s", "--runs-dir", str(tmp_path / "runs")]
    code, out, err = run_main(capsys, *words)
    assert code == 0, err
    assert "Not confirmed" in out
    folder = tmp_path / "runs" / "s.search"
    assert load_recipe(folder / "winner.yaml").model.laplacian_heads.startswith("linear(")
    code, out, err = run_main(capsys, *words)
    assert (code, "training" in err) == (0, False), err
    assert "finished" in out
