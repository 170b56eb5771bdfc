"""`extends` and `--set`: what is inherited, what is replaced, and whose line a problem names."""

from pathlib import Path

import pytest

from lapcli.recipe import RecipeError, load_recipe


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


def test_a_problem_names_the_file_it_stands_in(folder: Path, valid: str) -> None:
    (folder / "base.yaml").write_text(valid.replace("lr: 3e-4", "lr: fast").replace("  steps: 100\n", ""))
    (folder / "x.yaml").write_text("extends: base.yaml\n\ntrain:\n  batch: 4\n  epochs: no\n")
    assert lines_of("x.yaml") == [
        "3 errors in x.yaml; nothing was started.",
        'x.yaml:5  train.epochs: expected a number, got "no"',
        "base.yaml:12  train.micro_batch: 8 is beyond the global batch 4 (`batch` is from x.yaml:4)",
        'base.yaml:14  optimizer.lr: expected a number, got "fast"',
    ]


def test_a_missing_key_points_to_the_section_of_the_nearest_file(folder: Path, valid: str) -> None:
    (folder / "base.yaml").write_text(valid.replace("  batch: 32\n", ""))
    (folder / "x.yaml").write_text("extends: base.yaml\n")
    assert lines_of("x.yaml")[1:] == ["base.yaml:10  train.batch: is missing; add it"]
    (folder / "x.yaml").write_text("extends: base.yaml\ntrain:\n  steps: 3\n")
    assert lines_of("x.yaml", "train.epochs=2")[1:] == ["x.yaml:2  train.batch: is missing; add it"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("x.yaml", "the files extend each other: x.yaml -> x.yaml"),
        ("./y.yaml", "the files extend each other: x.yaml -> y.yaml -> x.yaml"),
        ("bse.yaml", '"bse.yaml" does not exist; did you mean base.yaml?'),
        ("/etc/passwd", 'expected the name of one .yaml file, got "/etc/passwd"'),
        ("[base.yaml]", 'expected the name of one .yaml file, got ["base.yaml"]'),
        ("", "expected the name of one .yaml file, got nothing (null)"),
        ("'qqqqqqqqqqqqqqqq\\0.yaml'", '"qqqqqqqqqqqqqqqq\\\\0.yaml" does not exist; check the name'),
        ('"qqqqqqqqqqqqqqqq\\0.yaml"', '"qqqqqqqqqqqqqqqq\\u0000.yaml" does not exist; check the name'),
        ("folder.yaml", '"folder.yaml" is not a file; name a .yaml file'),
    ],
)
def test_extends_that_leads_nowhere(folder: Path, valid: str, said: str, message: str) -> None:
    (folder / "base.yaml").write_text(valid)
    (folder / "folder.yaml").mkdir()
    (folder / "x.yaml").write_text(f"seed: 1\nextends: {said}\n")
    (folder / "y.yaml").write_text("seed: 1\nextends: x.yaml\n")
    where = "y.yaml:2" if "y.yaml" in message and "x.yaml" in message else "x.yaml:2"
    assert lines_of("x.yaml") == ["1 error in x.yaml; nothing was started.", f"{where}  extends: {message}"]


def test_extends_only_at_the_top(problems, valid: str) -> None:
    assert problems(valid.replace("steps: 100", "steps: 100\n  extends: x.yaml"))[0].startswith(
        "x.yaml:14  train.extends: unknown key"
    )


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
        ("=3", '--set  expected key.path=value, such as train.steps=100, got "=3"'),
        (
            "train..steps=3",
            '--set  train..steps: expected key.path=value, such as train.steps=100, got "train..steps=3"',
        ),
        ("train.steps=", "--set  train.steps: has no value after `=`; write null to mean none"),
        ("train.steps=[", "--set  train.steps: is not YAML: expected the node content, but found '<stream end>'"),
        ("train.steps=!!int 3", "--set  train.steps: tags (`!name`) are not used in recipes; remove it"),
        ("train.steps=ten", '--set  train.steps: expected a whole number, got "ten"'),
        ("train.stpes=3", "--set  train.stpes: unknown key; did you mean `steps`?"),
        ("train={steps: 1, steps: 2}", "--set  train.steps: is given twice (first at --set); keep one"),
        ("train.steps.x=3", "--set  train.steps.x: `train.steps` is 100, which has no keys; set `train.steps` itself"),
        (
            "optimizer.betas.0=3",
            "--set  optimizer.betas.0: `optimizer.betas` is [0.8, 0.95], which has no keys; "
            "set `optimizer.betas` itself",
        ),
        ("extends=y.yaml", "--set  extends: stands in a file and cannot be set; make a recipe that extends it"),
        ("train.batch=4", "x.yaml:12  train.micro_batch: 8 is beyond the global batch 4 (`batch` is from --set)"),
    ],
)
def test_an_override_that_is_wrong(problems, valid: str, override: str, line: str) -> None:
    assert problems(valid, override) == [line]


def test_a_path_of_ten_thousand_parts(problems, valid: str) -> None:
    assert problems(valid, ".".join("a" * 10_000) + "=1")[0].startswith("--set  ")


def test_a_wrong_seed_is_the_options(problems, valid: str) -> None:
    assert problems(valid, seed=-1) == ["--seed  seed: expected at least 0, got -1"]
