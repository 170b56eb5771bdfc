"""Loading as a whole: numbers, and ten ways to damage a recipe that must all end in a recipe or in our error."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import ROOT

from lapcli.recipe import BaseRecipe, RecipeError, load_recipe, recipe_to_yaml
from lapcli.runtime.errors import ExitCode, UsageError


def test_the_recipe_that_is_damaged_below_is_whole(folder: Path) -> None:
    (folder / "x.yaml").write_text("\n".join(LINES))
    assert load_recipe("x.yaml").model.head_plan().per_layer == (0, 3, 3, 0)


def test_numbers_are_what_their_writers_mean(folder: Path, valid: str) -> None:
    (folder / "x.yaml").write_text(valid.replace("batch: 32", "batch: 1e2").replace("steps: 100", "steps: 10_000"))
    recipe = load_recipe("x.yaml")
    assert recipe.optimizer.lr == 0.0003
    assert recipe.train.batch == 100
    assert type(recipe.train.batch) is int
    assert recipe.train.steps == 10_000


def test_the_error_is_wrong_usage(folder: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_recipe("none.yaml")
    assert caught.value.exit_code == ExitCode.USAGE


def test_loading_needs_no_torch() -> None:
    code = "import sys, lapcli.recipe; print({'torch', 'timm', 'datasets', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


LINES = """\
objective: language_model
seed: 7
model:
  layers: 4
  width: 64
  heads: 4
  laplacian_heads: {layers: 1-2, heads: 3}
  rotary_precision: bf16
tokenizer:
  vocab: 4_096
data:
  train: hub:someone/some-text
  files: ["a-{000..003}.parquet", b.parquet]
  validation: last_file
train:
  batch: 32
  micro_batch: 8
  steps: 1e2
  compile: false
optimizer:
  lr: 3e-4
  betas: [0.8, 0.95]
schedule:
  warmdown: .4
validation:
  every: null
  prompts:
    - "Once upon"
    - 'a time'
checkpoint: {every: 50, keep: 3}
""".splitlines()
KEYS = [number for number, line in enumerate(LINES) if ":" in line]
VALUES = [
    *(
        "ten",
        "''",
        "~",
        "true",
        "yes",
        "0",
        "-1",
        "1.5",
        ".nan",
        ".inf",
        "-.inf",
        "1e999",
        "1e308",
        "9" * 40,
        "9" * 5000,
    ),
    *("0x" + "f" * 150, "[]", "{}", "[[[]]]", "{a: {b: c}}", "[1, x]", "linear(0, 9)", "linear(9" + "9" * 99 + ", 1)"),
    *("{layers: 0-9, heads: 1}", "{layers: [x], heads: .nan}", "{layers: 3, heads: 1e400}", "!!python/object:a.b {}"),
    *(
        "!x y",
        "&a [*a]",
        "*a",
        "&a 1",
        "|\n  text",
        '"\\ud800"',
        '"\\UFFFFFFFF"',
        "'",
        "[",
        "]",
        "{",
        "@",
        "`",
        "%",
        "\t",
    ),
    *("? a", "- a", "<<", "hub:a", "hub:a/b", "builtin", "\x00", "\ufeff", "\u2028", "💥", "2024-01-01", "1:30"),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid recipe, changed one to four times: in its lines, then in its bytes."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key, colon, _ = lines[at].partition(":")
        change = draw(st.sampled_from(["delete", "rename", "twice", "value", "value", "indent", "insert", "extends"]))
        if change == "delete":
            del lines[at]
        elif change == "rename":
            lines[at] = lines[at].replace(key.strip(), draw(st.text(max_size=5)) or "x", 1)
        elif change == "twice":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif change == "value" and colon:
            lines[at] = f"{key}: {draw(st.one_of(st.sampled_from(VALUES), st.text(max_size=8)))}"
        elif change == "indent":
            lines[at] = (
                draw(st.sampled_from([" ", "  ", "\t", "- ", "? ", "[", "{", "#", "!t ", "&a ", "*a "])) + lines[at]
            )
        elif change == "extends":
            name = draw(
                st.sampled_from(["damaged.yaml", "none.yaml", "'\\0.yaml'", '"\\0.yaml"', "..", "x" * 300 + ".yaml"])
            )
            lines.append(f"extends: {name}")
        elif change == "insert":
            lines.insert(
                at, draw(st.sampled_from(["---", "...", "%YAML 9.9", "<<: *a", "{}", "[" * 99, "a: &a {b: *a}"]))
            )
        if not lines:
            break
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    how = draw(st.sampled_from(["whole", "whole", "whole", "cut", "bytes"]))
    at = draw(st.integers(0, len(content)))
    if how == "cut":
        return content[:at]
    return content[:at] + draw(st.binary(max_size=4)) + content[at:] if how == "bytes" else content


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    damaged(),
    st.lists(st.one_of(st.text(max_size=12), st.sampled_from([f"train.steps={v}" for v in VALUES])), max_size=1),
)
def test_a_damaged_recipe_loads_or_is_refused(tmp_path_factory, content: bytes, overrides: list[str]) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_bytes(content)
    refused: RecipeError | None = None
    try:
        recipe = load_recipe(path, overrides)
    except RecipeError as error:
        refused = error
    if refused:
        assert refused.problems
        assert str(refused).splitlines()[0].endswith(f"in {path}; nothing was started.")
        assert all(line.isprintable() for line in str(refused).splitlines())
    else:
        assert isinstance(recipe, BaseRecipe)
        path.write_bytes(recipe_to_yaml(recipe).encode())
        assert load_recipe(path) == recipe


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(KEYS), st.from_regex(r"zq[a-z]{1,12}", fullmatch=True))
def test_an_unknown_key_is_always_named_with_its_line(tmp_path_factory, at: int, name: str) -> None:
    """Next to any key of the recipe, in any section."""
    indent = " " * (len(LINES[at]) - len(LINES[at].lstrip()))
    path = tmp_path_factory.getbasetemp() / "unknown.yaml"
    path.write_text("\n".join([*LINES[:at], f"{indent}{name}: 1", *LINES[at:]]))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}:{at + 1}"
    assert problem.key.split(".")[-1] == name
    assert problem.message.startswith("unknown key")


def test_most_random_damage_is_noticed(tmp_path: Path) -> None:
    """Swaps each value of the recipe for each odd one: the refusals must be the rule, or the fuzzing tests nothing."""
    path = tmp_path / "x.yaml"
    refused = 0
    trials = [(at, value) for at in KEYS for value in VALUES]
    random.Random(0).shuffle(trials)
    for at, value in trials[:200]:
        path.write_text("\n".join([*LINES[:at], f"{LINES[at].partition(':')[0]}: {value}", *LINES[at + 1 :]]))
        try:
            load_recipe(path)
        except RecipeError:
            refused += 1
    assert 170 <= refused < 200


def test_epochs_on_the_command_line_put_the_recipes_steps_aside():
    path = ROOT / "recipes" / "quickstart.yaml"
    assert load_recipe(path).train.steps is not None
    asked = load_recipe(path, ["train.epochs=2"]).train
    assert (asked.steps, asked.epochs) == (None, 2)
    both = load_recipe(path, ["train.epochs=2", "train.steps=7"]).train
    assert (both.steps, both.epochs) == (7, 2)
    stage = load_recipe(ROOT / "recipes" / "chat_quickstart.yaml", ["stages.sft.train.epochs=2"]).stages.sft.train
    assert (stage.steps, stage.epochs) == (None, 2)
