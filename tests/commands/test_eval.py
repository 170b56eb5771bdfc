"""`lap eval` on a small image run, as a user types it."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from image_support import TINY_IMAGES
from support import lap

from lapcli.data.images.sources import Digits
from lapcli.recipe import recipe_from_dict, recipe_to_yaml
from lapcli.result_rows import results


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_cache):
    folder = tmp_path_factory.mktemp("eval")
    (folder / "tiny.yaml").write_text(recipe_to_yaml(recipe_from_dict(TINY_IMAGES)))
    runs = folder / "runs"
    result = lap("train", str(folder / "tiny.yaml"), "--runs-dir", str(runs), cache=shared_cache)
    assert result.returncode == 0, result.stderr
    assert "lap eval tiny" in result.stdout
    return runs


def evaluated(runs, *arguments, processes=1):
    result = lap("eval", "--runs-dir", str(runs), *arguments, processes=processes)
    assert result.returncode == 0, result.stderr
    return result


def test_the_table_and_the_stored_results(trained):
    result = evaluated(trained, "--tasks", "top1,top5")
    weights = trained / "tiny" / "checkpoints" / "step-000010" / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert digest in result.stdout
    assert digest in result.stderr  # also said before the work starts
    rows = results(["tiny"], trained)
    rows = rows[rows.task.isin(["top1", "top5"])].set_index("task")
    for word in ("top1", "top5", "95% interval", "359", "builtin"):
        assert word in result.stdout
    (kept,) = (trained / "tiny" / "eval").glob("step-000010_top1+top5_*.json")
    content = json.loads(kept.read_text())
    assert content["weights_sha256"] == digest
    assert content["tasks"]["top1"]["count"] == 359
    last = [json.loads(line) for line in (trained / "tiny" / "metrics.jsonl").read_text().splitlines()][-1]
    assert content["tasks"]["top1"]["value"] == last["validation_top1"]
    assert content["tasks"]["top5"]["value"] == last["validation_top5"]
    assert rows.value.to_dict() == {task: last[f"validation_{task}"] for task in ("top1", "top5")}
    assert set(rows.unit) == {"fraction"}
    assert set(rows.checkpoint) == {"last"}


def test_results_do_not_depend_on_processes_or_batch_size(trained):
    found = [
        json.loads(evaluated(trained, "--run", "tiny", "--json", "--batch", batch, processes=processes).stdout)
        for processes, batch in ((1, "64"), (2, "7"))
    ]
    assert found[0] == found[1]
    assert found[0]["tasks"]["top1"]["count"] == 359


def write_digits(folder, names):
    """Six images per class, in a folder named after the class."""
    digits = Digits()
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for number, index in enumerate(np.flatnonzero(digits.labels == label)[:6]):
            digits.image(int(index)).save(folder / name / f"{number}.png")
    return folder


def test_a_plain_folder_is_evaluated_completely_and_a_limit_is_spread_over_it(trained, tmp_path):
    folder = write_digits(tmp_path / "digits", [str(number) for number in range(10)])
    whole = json.loads(evaluated(trained, "--tasks", "top1", "--data", str(folder), "--json").stdout)
    assert (whole["tasks"]["top1"]["count"], "60 images of 10 classes" in whole["data"]) == (60, True)
    some = json.loads(evaluated(trained, "--data", str(folder), "--limit", "10", "--json").stdout)["tasks"]
    assert some["top1"]["count"] == 10
    # The same ten images alone: one per class out of the 60, which are ordered by class.
    for place, position in enumerate(round(number * 59 / 9) for number in range(10)):
        label, number = divmod(position, 6)
        assert label == place
        (tmp_path / "some" / str(label)).mkdir(parents=True)
        shutil.copy(folder / str(label) / f"{number}.png", tmp_path / "some" / str(label))
    alone = json.loads(evaluated(trained, "--data", str(tmp_path / "some"), "--json").stdout)["tasks"]
    assert [some[task]["value"] for task in some] == [alone[task]["value"] for task in alone]
