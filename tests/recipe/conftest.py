"""A valid recipe for the tests to modify."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lapcli.recipe import RecipeError, load_recipe

_VALID = """\
objective: language_model
seed: 7
model:
  layers: 4
  width: 64
  heads: 4
  laplacian_heads: 2
data:
  train: builtin
train:
  batch: 32
  micro_batch: 8
  steps: 100
optimizer:
  lr: 3e-4
  betas: [0.8, 0.95]
validation:
  prompts:
    - "Once upon"
    - 'a time'
"""

Problems = Callable[..., list[str]]


@pytest.fixture
def valid() -> str:
    return _VALID


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that locations in messages are short: `x.yaml:3`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def problems(folder: Path) -> Problems:
    """The problem lines of a recipe text; fails if it loads."""

    def problem_lines(text: str | bytes, *overrides: str, seed: int | None = None) -> list[str]:
        (folder / "x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(RecipeError) as caught:
            load_recipe("x.yaml", overrides, seed)
        count, *lines = str(caught.value).splitlines()
        assert count == f"{len(lines)} error{'' if len(lines) == 1 else 's'} in x.yaml; nothing was started."
        return lines

    return problem_lines
