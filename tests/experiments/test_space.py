"""What may be searched: the values that parameters stand for, the control, and every problem of a space at once."""

import pytest
from search_support import quick_recipe, search_of, settings_of
from support import run_main

from lapcli.experiments.search import read_space
from lapcli.recipe import find_recipe
from lapcli.runtime.errors import UsageError

HEADS, OPERATORS = "model.laplacian_heads", "model.operators"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return quick_recipe(tmp_path_factory.mktemp("recipe"))


def plan(recipe, over, **params):
    space = read_space(recipe, over, [])
    return space.load({f"{next(iter(over))}.{name}": value for name, value in params.items()}).model.head_plan()


@pytest.mark.parametrize(
    ("domain", "params", "letters"),
    [
        ({"per_layer": [0, 4]}, {"layer0": 1, "layer1": 4}, ["AAAL", "LLLL"]),
        ({"linear": [0, 4]}, {"first": 4, "last": 1}, ["LLLL", "AAAL"]),
    ],
)
def test_a_plan_is_where_its_parameters_say(recipe, domain, params, letters):
    found = plan(recipe, {HEADS: [domain]}, **params)
    assert [found.letters(layer) for layer in range(2)] == letters


def test_the_control_has_one_number_of_heads_and_begins_with_the_plain_recipe(recipe, tmp_path):
    over = {HEADS: [{"per_layer": [1, 4]}], "optimizer.lr": [{"from": 1e-3, "to": 1e-1, "log": True}]}
    search = search_of(recipe, tmp_path, over=over)
    ends = {name: (each.low, each.high) for name, each in search.spaces["control"].distributions.items()}
    assert ends == {HEADS: (0, 4), "optimizer.lr": (1e-3, 1e-1)}
    # It begins with the plain model at the recipe's own rate, which is Muon's 0.02.
    assert search.propose("control").params == {HEADS: 0, "optimizer.lr": 0.02}


def test_the_control_of_other_keys_is_the_recipe(recipe, tmp_path):
    search = search_of(recipe, tmp_path, over={"optimizer.lr": [0.01, 0.02]})
    assert search.propose("control").params == {}
    assert search.spaces["control"].load({}) == search.settings.space.base


@pytest.mark.parametrize(
    "over",
    [
        {"model.depth": [1, 2]},
        {HEADS: [5]},
        {"optimizer.lr": [{"per_layer": [0, 4]}]},
        {HEADS: [{"per_layer": [0, 4]}], OPERATORS: [{"laplacian": 1}]},
        {HEADS: [2, 2]},
        {"optimizer.lr": [{"from": 0.1, "to": 0.01}]},
        {"schedule.warmdown": [{"from": 0, "to": 1, "log": True}]},
        {"train.precision": ["float32", "float8"]},
        {"seed": [0, 1]},
    ],
)
def test_a_wrong_domain_is_refused(recipe, over):
    with pytest.raises(UsageError, match=list(over)[-1]):
        read_space(recipe, over, [])


def test_the_direction_is_the_metrics_own(recipe):
    assert settings_of(recipe).direction == "lower"
    assert settings_of(find_recipe("vit_digits"), {HEADS: [0, 1]}, metric="validation_top1").direction == "higher"
    with pytest.raises(UsageError, match="validation_bits_per_byte"):
        _ = settings_of(recipe, metric="top1").direction


def test_the_dry_run_prints_both_arms_and_starts_nothing(recipe, tmp_path, capsys):
    words = ["search", str(recipe), "--over", f"{HEADS}={{per_layer: [0, 4]}}", "--runs-dir", str(tmp_path / "r")]
    code, out, err = run_main(capsys, *words, "--dry-run")
    assert code == 0, err
    rows = [line.split()[:2] for line in out.splitlines()[1:]]
    assert [row for row in rows if row[0] in ("search", "control")] == [
        ["search", f"{HEADS}.layer0"],
        ["search", f"{HEADS}.layer1"],
        ["control", HEADS],
    ]
    assert not (tmp_path / "r").exists()
