"""What may be searched: the values that parameters stand for, the control, and every problem of a space at once."""

import pytest
from search_support import quick_recipe, spec_of
from support import lap, run_main

from lapcli.recipe import RecipeError, find_recipe
from lapcli.runtime.errors import UsageError
from lapcli.search.proposals import propose, rung
from lapcli.search.space import placed, space_from_options
from lapcli.search.trials import CONTROL, SEARCH

HEADS, OPERATORS = "model.laplacian_heads", "model.operators"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return quick_recipe(tmp_path_factory.mktemp("recipe"))


def plan(recipe, over, **params):
    space = space_from_options(recipe, over, [])
    return space.load({f"{next(iter(over))}.{name}": value for name, value in params.items()}).model.head_plan()


@pytest.mark.parametrize(
    ("domain", "params", "letters"),
    [
        ({"per_layer": [0, 4]}, {"layer0": 1, "layer1": 4}, ["AAAL", "LLLL"]),
        ({"constant": [0, 4]}, {"each": 2}, ["AALL", "AALL"]),
        ({"linear": [0, 4]}, {"first": 4, "last": 1}, ["LLLL", "AAAL"]),
        ({"total": [0, 8]}, {"total": 5, "place": '"last"'}, ["AAAL", "LLLL"]),
        ({"total": [0, 8]}, {"total": 5, "place": '"first"'}, ["LLLL", "AAAL"]),
        ({"total": [0, 8]}, {"total": 5, "place": '"spread"'}, ["AALL", "ALLL"]),
    ],
)
def test_a_plan_is_where_its_parameters_say(recipe, domain, params, letters):
    found = plan(recipe, {HEADS: [domain]}, **params)
    assert [found.letters(layer) for layer in range(2)] == letters


def test_operators_are_a_choice_beside_their_number(recipe):
    over = {OPERATORS: [{"per_layer": [0, 4], "operator": ["laplacian", "exclusive"]}]}
    assert plan(recipe, over, layer0=0, layer1=3, operator='"exclusive"').counts() == {"exclusive": 3}
    assert plan(recipe, over, layer0=0, layer1=3, operator='"laplacian"').per_layer == (0, 3)


def test_a_choice_of_operators_is_tried_in_its_order(recipe):
    choices = [{"laplacian": 1, "exclusive": 2}, {"exclusive": 2, "laplacian": 1}]
    space = space_from_options(recipe, {OPERATORS: choices}, [])
    plans = [space.load({OPERATORS: text}).model.head_plan() for text in space.domains[0].parameters[0].choices]
    assert [plan.letters(0) for plan in plans] == ["AXXL", "ALXX"]


@pytest.mark.parametrize("place", ["first", "last", "spread"])
def test_heads_are_placed_whole(place):
    for total in range(3 * 4 + 1):
        counts = placed(total, place, 3, 4)
        assert sum(counts) == total
        assert all(0 <= count <= 4 for count in counts)
        if place == "spread":
            assert max(counts) - min(counts) <= 1


def test_the_control_has_one_number_of_heads_and_the_same_other_keys(recipe):
    over = {HEADS: [{"per_layer": [1, 4]}], "optimizer.lr": [{"from": 1e-3, "to": 1e-1, "log": True}]}
    control = spec_of(recipe, over).arm(CONTROL)
    assert {parameter.name: parameter.ends() for parameter in control.parameters} == {
        f"{HEADS}.each": [0, 4],
        "optimizer.lr": [1e-3, 1e-1],
    }
    assert control.load({f"{HEADS}.each": 0, "optimizer.lr": 0.01}).model.head_plan().is_plain
    # It begins with the plain model at the recipe's own rate, which is Muon's 0.02.
    assert propose(spec_of(recipe, over), CONTROL, []) == {f"{HEADS}.each": 0, "optimizer.lr": 0.02}


def test_the_control_of_other_keys_is_the_recipe(recipe):
    spec = spec_of(recipe, {"optimizer.lr": [0.01, 0.02]})
    assert propose(spec, CONTROL, []) == {}
    assert spec.arm(CONTROL).load({}) == spec.space.base


def test_a_proposal_depends_on_the_seed_alone(recipe):
    one, same, other = (propose(spec_of(recipe, seed=seed), SEARCH, []) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_the_first_rung_is_the_first_validation(recipe):
    assert rung(spec_of(recipe)) == 4
    assert rung(spec_of(recipe, options=["validation.every=12"])) is None
    assert rung(spec_of(recipe, options=["validation.every=null"])) is None


def test_a_wrong_space_file_lists_all_its_problems(tmp_path, recipe, capsys):
    space = tmp_path / "space.yaml"
    space.write_text(
        "model.laplacian_heads: {per_layer: [0, 9]}\n"
        "optimizer.lr: {from: 0.1, to: 0.01}\n"
        "optimizer.larning_rate: [1, 2]\n"
        "train.batch: 8\n"
        "schedule.warmdown: {from: 0, to: 1, log: true}\n"
        "validation.every: {from: 1, to: 8, steps: 2}\n"
        "train.precision: [float32, float8]\n"
        "seed: [0, 1]\n"
        "model.operators: {total: [0, 4], operator: laplace}\n"
    )
    code, out, err = run_main(capsys, "search", str(recipe), "--space", str(space), "--runs-dir", str(tmp_path / "r"))
    assert (code, out) == (2, "")
    assert not (tmp_path / "r").exists()
    for line, words in (
        (1, "per_layer: expected two integers from 0 to 4, the lower first, got [0, 9]"),
        (2, "from must be less than to, got from 0.1 to 0.01"),
        (3, "unknown key"),
        (4, "expected a list of choices"),
        (5, "a logarithmic range must start above 0"),
        (6, "expected a list of choices"),
        (7, "float8"),
        (8, "the seed cannot be searched"),
        (9, "operator: expected one or more of"),
    ):
        said = [text for text in err.splitlines() if text.startswith(f"{space}:{line} ")]
        assert said, f"nothing of line {line}: {err}"
        assert words in " ".join(err.split())


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"model.depth": [1, 2]}, "unknown key"),
        ({HEADS: [5]}, "layer 0 has 4 heads"),
        ({"optimizer.lr": [{"per_layer": [0, 4]}]}, "is a head plan"),
        ({HEADS: [{"per_layer": [0, 4]}], OPERATORS: [{"laplacian": 1}]}, "search over one of the two"),
        ({HEADS: [2, 2]}, "distinct choices"),
    ],
)
def test_a_wrong_domain_is_refused(recipe, over, words):
    with pytest.raises(RecipeError, match=words):
        spec_of(recipe, over)


def test_a_metric_that_no_validation_gives_is_refused_with_those_there_are(recipe, tmp_path, capsys):
    with pytest.raises(
        UsageError, match="'top1' is not a validation metric of this recipe; use one of validation_loss"
    ):
        spec_of(recipe, metric="top1")
    code, _, err = run_main(capsys, "search", str(recipe), "--over", f"{HEADS}=0,1", "--metric", "accuracy")
    assert code == 2
    assert "validation_bits_per_byte" in err


def test_better_is_lower_of_a_loss_and_higher_of_an_accuracy(recipe):
    assert not spec_of(recipe).higher_is_better
    assert spec_of(find_recipe("vit_digits"), {HEADS: [0, 1]}, metric="validation_top1").higher_is_better


def test_another_space_under_the_same_name_is_refused(recipe, tmp_path):
    from lapcli.search.trials import create, read_trials

    spec = spec_of(recipe)
    create(spec, tmp_path, spec.cell(SEARCH, 0, propose(spec, SEARCH, [])), SEARCH, 0, [])
    assert len(read_trials(spec, tmp_path)[SEARCH]) == 1
    with pytest.raises(UsageError, match=r"another seed.*choose another --name"):
        read_trials(spec_of(recipe, seed=3), tmp_path)
    with pytest.raises(UsageError, match="another recipe"):
        read_trials(spec_of(recipe, options=["train.steps=20"]), tmp_path)


def test_search_and_sweep_name_each_other():
    assert "lap sweep" in lap("search", "--help").stdout
    assert "lap search" in lap("sweep", "--help").stdout


def test_a_search_needs_one_space(recipe, capsys):
    for arguments in ([], ["--over", "seed=1", "--space", "x.yaml"]):
        code, _, err = run_main(capsys, "search", str(recipe), *arguments)
        assert code == 2
        assert "either by --space FILE or by --over" in err
