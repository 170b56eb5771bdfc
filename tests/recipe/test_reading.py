"""Files that are not recipes: each is refused with its location, and its content is not quoted."""

from pathlib import Path

import pytest

from lapcli.recipe import RecipeError, load_recipe
from lapcli.recipe.reading import read_plain


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("# only a comment\n", "x.yaml  is empty; a recipe starts with `objective:` or `extends:`"),
        ("secret words\n", "x.yaml:1  expected `key: value` lines; is this a recipe?"),
        (b"a: 1\nb: \xff\n", "x.yaml  is not UTF-8 text; save the recipe as UTF-8"),
        ("a: [1,\nb: 2\n", "x.yaml:3  is not YAML; check its quotes, brackets and indent"),
        ("a:\n\tb: 1\n", "x.yaml:2  is not YAML; check its quotes, brackets and indent"),
        ("a: *secret\n", "x.yaml:1  is not YAML; check its quotes, brackets and indent"),
        ("a: " + "[" * 5000, "x.yaml:1  is nested too deeply for a recipe"),
        ("? [a, b]\n: 1\n", "x.yaml:1  a key must be a word"),
    ],
)
def test_files_that_are_not_recipes(problems, text: str | bytes, line: str) -> None:
    assert problems(text) == [line]


def test_billion_laughs_are_refused(problems) -> None:
    """Lines with 10, 91, 820 and 7,381 values are accepted; the fifth would be 66,430."""
    laughs = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    laughs += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    message = "holds more than 10000 values (aliases count in full); no recipe does"
    assert problems("\n".join(laughs)) == [f"x.yaml:1  {message}"]  # where the first of them stands


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.system", "!!int"])
def test_tags_are_refused_with_their_line(problems, valid: str, tag: str) -> None:
    assert problems(valid.replace("steps: 100", f"steps: {tag} 100")) == [
        "x.yaml:13  train.steps: recipes do not support tags (`!name`); remove the tag"
    ]


def test_duplicate_keys(problems, valid: str) -> None:
    text = valid.replace("  steps: 100\n", "  steps: 100\n  batch: 64\n") + "seed: 8\n"
    assert problems(text) == [
        "x.yaml:14  train.batch: is given twice (first at x.yaml:11); keep one",
        "x.yaml:22  seed: is given twice (first at x.yaml:2); keep one",
    ]


@pytest.mark.parametrize("text", ["hunter2", "*hunter2", "!hunter2 a"])
def test_extends_does_not_quote_other_files(folder: Path, text: str) -> None:
    (folder / "secret.yaml").write_text(text)
    (folder / "x.yaml").write_text("extends: secret.yaml\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("x.yaml")
    assert "secret.yaml" in str(caught.value)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 0.0003),
        ("10_485_760", 10_485_760),
        ("010", 10),  # not eight
        ("", None),
        ("no", "no"),
        ("1:30", "1:30"),  # not ninety
        ("6-11", "6-11"),
        ("9" * 5000, "9" * 5000),  # Python would refuse to read it
    ],
)
def test_unquoted_words(text: str, value: object) -> None:
    read = read_plain(text)
    assert read == value
    assert type(read) is type(value)
