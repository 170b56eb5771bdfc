"""What `lap train` suggests after a run."""

import shlex

import pytest
from support import run_main
from sweep_support import write_recipe

from lapcli.recipe import load_recipe


@pytest.mark.parametrize("heads", [{"laplacian_heads": 2}, {"laplacian_heads": 0, "operators": {"exclusive": 1}}])
def test_the_suggested_baseline_has_only_plain_heads(tmp_path, capsys, heads):
    recipe = write_recipe(tmp_path, train={"steps": 1}, model=heads)
    code, out, err = run_main(capsys, "train", str(recipe), "--runs-dir", str(tmp_path / "runs"))
    assert code == 0, err
    words = next(shlex.split(line) for line in out.splitlines() if line.startswith("  lap train "))
    assert load_recipe(words[2], [words[words.index("--set") + 1]]).model.head_plan().counts() == {}
