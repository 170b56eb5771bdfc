"""Which tasks fit which models, and what is refused before anything is loaded."""

import json
import sys

import pytest
import yaml
from harness_support import make_run
from image_support import TINY_IMAGES
from runtime.test_plugins import install, lap_with
from support import ROOT, run_process

from lapcli.evaluation.families import STOCK, chosen_tasks, evaluated_objectives, families_of
from lapcli.recipe import recipe_from_dict
from lapcli.runs import open_run
from lapcli.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("objective", "default", "last"),
    [
        ("classification", ["top1", "top5"], "ade20k"),
        ("self_supervised", ["knn"], "ade20k"),
        ("language_model", ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"], "bpb"),
        ("chat", ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"], "bpb"),
        (STOCK, ["knn"], "ade20k"),
    ],
)
def test_tasks_by_what_a_model_gives(objective, default, last):
    assert chosen_tasks(objective, None) == default
    assert list(families_of(objective)[-1].tasks)[-1] == last
    assert chosen_tasks(objective, f"{last}, {default[0]},{last}") == [last, default[0]]


@pytest.mark.parametrize(
    ("objective", "name", "said"),
    [
        ("classification", "top3", "no task 'top3' for a run of classification (did you mean top"),
        (
            "classification",
            "mmlu",
            "mmlu measures language, which a run of classification does not give; there are top1",
        ),
        ("self_supervised", "top1", "top1 measures classes of images, which a run of self_supervised does not give"),
        ("language_model", "top1", "top1 measures classes of images, which a run of language_model does not give"),
        ("language_model", "gsm8", "(did you mean gsm8k?)"),
        ("language_model", "hellaswagg", "(did you mean hellaswag?)"),
        ("language_model", "", "no task ''"),
        ("language_model", "openai", "no task 'openai'"),  # a word of lm-eval's files, as is the next
        ("language_model", "doc_to_text", "no task 'doc_to_text'"),
        (STOCK, "top1", "which a stock model does not give"),
        ("nonsense", "top1", "there is no objective 'nonsense'"),
    ],
)
def test_others_are_refused_with_the_nearest_name(objective, name, said):
    with pytest.raises(UsageError) as error:
        chosen_tasks(objective, name)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_names_of_lm_eval_are_known_from_its_files():
    names = "hellaswag,mmlu_stem,acp_bench,leaderboard_bbh_boolean_expressions"  # a task, groups, one in a template
    assert chosen_tasks("language_model", names) == names.split(",")


def test_every_objective_can_be_evaluated():
    assert evaluated_objectives() == ["language_model", "chat", "classification", "self_supervised"]


def test_wrong_tasks_and_options_are_refused_without_torch_and_lm_eval(tmp_path):
    """In a process of its own, which neither loads a model nor imports what would."""
    run = make_run(tmp_path, "language_model")
    open_run(tmp_path, "images", recipe_from_dict(TINY_IMAGES)).update(status="finished")
    code = """
import sys
from lapcli.cli import main
runs, *commands = sys.argv[1:]
for words in commands:
    sys.argv[1:] = ["eval", "--runs-dir", runs, *words.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, sorted({"torch", "lm_eval", "datasets"} & set(sys.modules)))
"""
    wrong = [
        "--run language_model --tasks top1",
        "--run language_model --tasks helaswag",
        "--run language_model --tasks spelling",
        "--run language_model --protocol paper",
        "--run images --samples 3",
        "--run images --tasks knn --set knn.neighbors=[1]",
    ]
    result = run_process(
        [sys.executable, "-c", code, str(run.path.parent), *wrong], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout == "2 []\n" * len(wrong), result.stderr


PICTURES = """
from typing import Literal

from lapcli.recipe.vision import ClassificationRecipe


class PicturesRecipe(ClassificationRecipe):
    objective: Literal["pictures"]


def register(extensions):
    extensions.add("objective", PicturesRecipe)
"""


def test_an_objective_of_another_package_is_evaluated_by_what_its_models_give(tmp_path):
    install(tmp_path, "gallery", PICTURES)
    recipe = {**TINY_IMAGES, "objective": "pictures"}
    recipe_file = tmp_path / "pictures.yaml"
    recipe_file.write_text(yaml.safe_dump(recipe))
    trained = lap_with(tmp_path, "train", str(recipe_file), "--runs-dir", str(tmp_path / "runs"), "--nproc", "1")
    assert trained.returncode == 0, trained.stderr
    result = lap_with(tmp_path, "eval", "--runs-dir", str(tmp_path / "runs"), "--tasks", "top1", "--json")
    assert result.returncode == 0, result.stderr
    scores = json.loads(result.stdout)["tasks"]
    lines = (tmp_path / "runs" / "pictures" / "metrics.jsonl").read_text().splitlines()
    assert scores["top1"]["value"] == json.loads(lines[-1])["validation_top1"]
