"""Values of `--over`, their combinations, and the names of the cells."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.experiments.cells import cell_name, overrides_of, parse_over, split_values
from lapcli.recipe.loading import apply_overrides
from lapcli.recipe.reading import Document
from lapcli.runtime.errors import UsageError

HEADS = "model.laplacian_heads"


def test_numbers_lists_schedules_and_ranges():
    over = parse_over([HEADS + "=0,[0,1,2,4],linear(0, 4),{layers: 2-3, heads: 4}", "optimizer.lr=3e-4,1"])
    assert over == {
        HEADS: [0, [0, 1, 2, 4], "linear(0, 4)", {"layers": "2-3", "heads": 4}],
        "optimizer.lr": [0.0003, 1],
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0, 1 ,2", ["0", "1", "2"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ("linear(0, 4),f(g(1, 2), 3)", ["linear(0, 4)", "f(g(1, 2), 3)"]),
        ("'a,b',\"c,d\"", ["'a,b'", '"c,d"']),
        ("a,,b", ["a", "", "b"]),
    ],
)
def test_commas_in_brackets_and_quotes_do_not_separate(text, parts):
    assert split_values(text) == parts


@pytest.mark.parametrize("options", [["seed"], ["seed="], ["=1"], ["seed=0,,1"], ["seed=0", "seed=1"], ["seed=[0"]])
def test_invalid_values_of_over(options):
    with pytest.raises(UsageError, match="--over"):
        parse_over(options)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({HEADS: 12, "model.drop_path": 0.1, "seed": 2}, "vitb-12L-drop_path0.1-seed2"),
        ({HEADS: [0, 1, 2, 4]}, "vitb-0_1_2_4L"),
        ({HEADS: "linear(0, 4)"}, "vitb-linear_0_4L"),
        ({HEADS: {"layers": "2-3", "heads": 4}}, "vitb-layers2-3_heads4L"),
        ({"optimizer.lr": 4e-05, "train.compile": False}, "vitb-lr4e-05-compilefalse"),
        ({"train.batch": 8, "validation.batch": 4}, "vitb-train.batch8-validation.batch4"),
    ],
)
def test_cell_names(values, name):
    assert cell_name("vitb", values) == name


# Control characters and lone surrogates are not YAML and are refused.
texts = st.text(st.characters(categories=("L", "N", "P", "S")), max_size=40)
values = st.one_of(st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False), texts)


@given(st.dictionaries(st.sampled_from([HEADS, "seed", "data.train", "a.b", "c.b"]), values, min_size=1), st.text())
def test_any_value_gives_a_valid_run_name(found, prefix):
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,109}", cell_name(prefix, found))


@given(st.one_of(values, st.lists(values, max_size=4)))
def test_an_override_round_trips(value):
    document, problems = apply_overrides(Document({}, {(): "x"}), overrides_of({"a.b": value}))
    assert not problems
    assert document.values == {"a": {"b": value}}
