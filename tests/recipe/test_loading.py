"""Loading end to end: numbers, and ten kinds of damage that must give either a recipe or our error."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import run_process

from lapcli.recipe import BaseRecipe, RecipeError, load_recipe, recipe_to_yaml


def test_numbers_are_read_as_intended(folder: Path, valid: str) -> None:
    (folder / "x.yaml").write_text(valid.replace("batch: 32", "batch: 1e2").replace("steps: 100", "steps: 10_000"))
    recipe = load_recipe("x.yaml")
    assert recipe.optimizer.lr == 0.0003
    assert recipe.train.batch == 100
    assert type(recipe.train.batch) is int
    assert recipe.train.steps == 10_000


def test_loading_needs_no_torch() -> None:
    code = "import sys, lapcli.recipe; print({'torch', 'timm', 'datasets', 'numpy'} & set(sys.modules))"
    assert run_process([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


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
  validation: 0.1
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
VALUES = ["ten", "''", "~", "true", "-1", "1.5", ".nan", "1e999", "9" * 5000, "[]", "{}", "[[[]]]", "{a: {b: c}}"]
VALUES += ["linear(0, 9)", "{layers: 3, heads: 1e400}", "!!python/object:a.b {}", "&a [*a]", "*a", "|\n  text"]
VALUES += ['"\\ud800"', '"\\UFFFFFFFF"', "'", "[", "@", "%", "\t", "- a", "<<", "hub:a", "builtin", "\x00", "\u2028"]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A valid recipe with one to four changed lines, then perhaps changed bytes."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key = lines[at].partition(":")[0]
        changed = {
            "delete": [],
            "rename": [lines[at].replace(key.strip() or "-", draw(st.text(max_size=5)) or "x", 1)],
            "twice": [lines[at], lines[at]],
            "value": [f"{key}: {draw(st.sampled_from(VALUES) | st.text(max_size=8))}"],
            "indent": [draw(st.sampled_from([" ", "\t", "- ", "? ", "[", "{", "#", "!t ", "&a ", "*a "])) + lines[at]],
            "insert": [draw(st.sampled_from(["---", "...", "%YAML 9.9", "<<: *a", "{}", "[" * 99])), lines[at]],
            "extends": [lines[at], f"extends: {draw(st.sampled_from(['damaged.yaml', 'none.yaml', '..', 'x' * 300]))}"],
        }
        lines[at : at + 1] = changed[draw(st.sampled_from([*changed, "value", "value"]))]
        if not lines:
            break
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.binary(max_size=4)) + content[at:] if draw(st.booleans()) else content


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


def lines_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


def test_a_chain_merges_mappings_and_replaces_the_rest(folder: Path, valid: str) -> None:
    (folder / "bases").mkdir()
    (folder / "bases" / "base.yaml").write_text(valid)
    (folder / "bases" / "mid.yml").write_text(
        "extends: base.yaml\ntrain:\n  steps: 50\noptimizer: {betas: [0.1, 0.2]}\n"
    )
    (folder / "x.yaml").write_text(
        "extends: bases/mid.yml\nseed: 9\ntrain:\n  micro_batch: 4\nvalidation: {prompts: []}\n"
    )
    recipe = load_recipe("x.yaml")
    assert recipe.seed == 9
    assert recipe.train.model_dump(include={"batch", "micro_batch", "steps"}) == {
        "batch": 32,
        "micro_batch": 4,
        "steps": 50,
    }
    assert recipe.optimizer.betas == [0.1, 0.2]
    assert recipe.optimizer.lr == 0.0003
    assert recipe.validation.prompts == []


def test_a_problem_names_the_file_that_contains_it(folder: Path, valid: str) -> None:
    (folder / "base.yaml").write_text(valid.replace("lr: 3e-4", "lr: fast").replace("  steps: 100\n", ""))
    (folder / "x.yaml").write_text("extends: base.yaml\n\ntrain:\n  batch: 4\n  epochs: no\n")
    assert lines_of("x.yaml") == [
        "2 errors in x.yaml; nothing was started.",
        'x.yaml:5  train.epochs: expected a valid number, got "no"',
        'base.yaml:14  optimizer.lr: expected a valid number, got "fast"',
    ]
    (folder / "x.yaml").write_text("extends: base.yaml\n\ntrain:\n  batch: 4\n  epochs: 1\noptimizer: {lr: 1}\n")
    assert lines_of("x.yaml")[1:] == [
        "base.yaml:12  train.micro_batch: 8 exceeds the global batch 4; give at most 4 (`batch` is from x.yaml:4)"
    ]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("x.yaml", "the files extend each other: x.yaml -> x.yaml"),
        ("bse.yaml", '"bse.yaml" is not a file; did you mean base.yaml?'),
        ("/etc/passwd", 'expected the name of one .yaml file, got "/etc/passwd"'),
    ],
)
def test_extends_of_a_missing_file(folder: Path, valid: str, said: str, message: str) -> None:
    (folder / "base.yaml").write_text(valid)
    (folder / "x.yaml").write_text(f"seed: 1\nextends: {said}\n")
    assert lines_of("x.yaml") == ["1 error in x.yaml; nothing was started.", f"x.yaml:2  extends: {message}"]


def test_overrides_follow_the_rules_of_the_file(folder: Path, valid: str) -> None:
    (folder / "x.yaml").write_text(valid)
    recipe = load_recipe(
        "x.yaml",
        [
            "optimizer.lr=1e-3",
            "train.steps=1_000",
            "train.steps=2e3",  # the last one wins
            "model.laplacian_heads={layers: 2-3, heads: 4}",
            "optimizer={weight_decay: .5}",  # joins, as a file that extends would
            "checkpoint.every=null",
            "tokenizer.file=a=b",
        ],
        seed=11,
    )
    assert recipe.optimizer.lr == 0.001
    assert recipe.optimizer.weight_decay == 0.5
    assert recipe.train.steps == 2000
    assert recipe.model.head_plan().per_layer == (0, 0, 4, 4)
    assert recipe.checkpoint.every is None
    assert recipe.tokenizer.file == "a=b"
    assert recipe.seed == 11


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.steps", '--set  train.steps: expected key.path=value, such as train.steps=100, got "train.steps"'),
        ("train.steps=[", "--set  train.steps: is not YAML; check its quotes, brackets and indent"),
        ("train.steps=ten", '--set  train.steps: expected a valid integer, got "ten"'),
        ("train.stpes=3", "--set  train.stpes: unknown key; did you mean `steps`?"),
        (
            "train.batch=4",
            "x.yaml:12  train.micro_batch: 8 exceeds the global batch 4; give at most 4 (`batch` is from --set)",
        ),
    ],
)
def test_an_invalid_override(problems, valid: str, override: str, line: str) -> None:
    assert problems(valid, override) == [line]


def test_the_later_of_two_head_spellings_wins(folder: Path, valid: str) -> None:
    (folder / "base.yaml").write_text(valid)  # with laplacian_heads: 2
    (folder / "x.yaml").write_text("extends: base.yaml\nmodel: {operators: {centered: 1}}\n")
    assert load_recipe("base.yaml", ["model.operators={mix: 3}"]).model.head_plan().counts() == {"mix": 12}
    assert load_recipe("x.yaml").model.head_plan().counts() == {"centered": 4}
    assert load_recipe("x.yaml", ["model.laplacian_heads=1"]).model.head_plan().counts() == {"laplacian": 4}


def test_keys_without_effect_are_named_with_their_lines_and_still_load(tmp_path, caplog):
    parent, path = tmp_path / "parent.yaml", tmp_path / "mine.yaml"
    parent.write_text(
        "objective: classification\nmodel: {layers: 1, width: 16, heads: 2, image: 8, patch: 4, classes: 10}\n"
        "data:\n  train: builtin\n  revision: main\n  validation: 0.2\n  augmentation: {policy: rand-m9}\n"
        "train: {epochs: 1, batch: 4, micro_batch: 4}\noptimizer: {name: adamw, lr: 1e-3}\n"
    )
    path.write_text("extends: parent.yaml\n")
    for _ in range(2):  # said once: a sweep loads the recipe for each cell
        load_recipe(path, ["data.augmentation.color_jitter=0.3"])
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    for key, place in (("revision", "parent.yaml:5"), ("color_jitter", "--set")):
        assert any(f".{key} " in line and place in line for line in said), said
