"""Each kind of problem, with its exact line, key and words."""

import pytest

from lapcli import recipe
from lapcli.recipe.reading import listed

OBJECTIVES = listed([f"`{name}`" for name in recipe.OBJECTIVES])


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        # Unknown keys: the nearest key in the section or another section, or the list of known keys.
        ("steps:", "stpes:", "x.yaml:13  train.stpes: unknown key; did you mean `steps`?"),
        ("seed: 7", "lr: 7", "x.yaml:2  lr: unknown key here; did you mean `optimizer.lr`?"),
        ("  train: builtin", "  train: builtin\n  Q: 1", "x.yaml:10  data.Q: unknown key; known here: train, revision, "
         "files, column, crop, shuffled, validation"),
        # Wrong types and ranges.
        ("steps: 100", "steps: ten", 'x.yaml:13  train.steps: expected a valid integer, got "ten"'),
        ("steps: 100", "steps: 100\n  precision: fp16",
         "x.yaml:14  train.precision: expected 'auto', 'float32' or 'bf16', got \"fp16\""),
        ("data:\n  train: builtin", "data: builtin",
         'x.yaml:8  data: expected keys under it, such as `train:`, got "builtin"'),
        ("0.95]", "1.5]", "x.yaml:16  optimizer.betas[1]: expected less than 1, got 1.5"),
        # Unions: one line for all forms.
        ("laplacian_heads: 2", "laplacian_heads: 2.5", "x.yaml:7  model.laplacian_heads: expected a number, a list "
         "with one number a layer, `linear(a, b)` or {layers:, heads:}, got 2.5"),
        # Missing keys: the line of the section.
        ("  batch: 32\n", "", "x.yaml:10  train.batch: is missing; add it"),
        ("data:\n  train: builtin\n", "", "x.yaml:1  data: the section is missing; it needs train"),
        ("language_model", "dance", f'x.yaml:1  objective: expected {OBJECTIVES}, got "dance"'),
        # Combinations.
        ("micro_batch: 8", "micro_batch: 64",
         "x.yaml:12  train.micro_batch: 64 exceeds the global batch 32; give at most 32"),
        ("laplacian_heads: 2", "laplacian_heads: 5",
         "x.yaml:7  model.laplacian_heads: layer 0 has 4 heads, so 0 to 4 can be Laplacian, got 5"),
    ],
)  # fmt: skip
def test_each_kind_of_problem(problems, valid: str, old: str, new: str, line: str) -> None:
    assert valid.count(old) >= 1
    assert problems(valid.replace(old, new, 1)) == [line]


def test_all_problems_at_once_in_reading_order(problems, valid: str) -> None:
    text = (
        valid.replace("seed: 7", "seed: -1")
        .replace("layers: 4", "layers: 4\n  rotary: 3")
        .replace("steps: 100", "stpes: ten")
        .replace("lr: 3e-4", "lr: fast")
    )
    assert problems(text, "checkpoint.kep=3", "nothing") == [
        "x.yaml:2  seed: expected greater than or equal to 0, got -1",
        "x.yaml:5  model.rotary: unknown key; did you mean `rotary_base`?",
        "x.yaml:14  train.stpes: unknown key; did you mean `steps`?",
        'x.yaml:16  optimizer.lr: expected a valid number, got "fast"',
        '--set  nothing: expected key.path=value, such as train.steps=100, got "nothing"',
        "--set  checkpoint.kep: unknown key; did you mean `keep`?",
    ]


def test_messages_stay_on_one_line_without_terminal_controls(problems, valid: str) -> None:
    lines = problems(valid + '"a\\e[31m\\nb": 1\n"' + "k" * 500 + '": 2\n', 'seed="\\e[31m\\n' + "v" * 500 + '"')
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)
    assert lines[0].startswith("x.yaml:21  a\\x1b[31m\\nb: unknown key")
    assert lines[1].startswith(f"x.yaml:22  {'k' * 59}…: unknown key")
    assert len(lines[2]) < 140
