"""The tasks of each kind of model, and refusals before anything is loaded."""

import sys

import pytest
from harness_support import make_run
from image_support import TINY_IMAGES
from support import ROOT, run_process

from lapcli.evaluation.tasks import chosen_tasks, evaluated_objectives, new_request, tasks_of
from lapcli.recipe import recipe_from_dict
from lapcli.runs import open_run
from lapcli.runtime.errors import UsageError

PAPER = ["arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"]


@pytest.mark.parametrize(
    ("objective", "default", "last"),
    [
        ("classification", ["top1", "top5"], "ade20k"),
        ("self_supervised", ["knn"], "ade20k"),
        ("language_model", PAPER, "bpb"),
        ("chat", PAPER, "bpb"),
    ],
)
def test_tasks_are_selected_by_model_outputs(objective, default, last):
    assert chosen_tasks(objective, None) == default
    assert tasks_of(objective)[-1] == last
    assert chosen_tasks(objective, f"{last}, {default[0]},{last}") == [last, default[0]]
    assert objective in evaluated_objectives()


@pytest.mark.parametrize(
    ("objective", "name", "named"),
    [
        ("classification", "top3", "top1"),
        ("self_supervised", "top1", "linear"),
        ("language_model", "gsm8", "gsm8k?"),
        ("language_model", "hellaswagg", "hellaswag?"),
        ("language_model", "", "''"),
    ],
)
def test_unknown_tasks_are_refused_with_the_nearest_name(objective, name, named):
    with pytest.raises(UsageError) as error:
        chosen_tasks(objective, name)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("objective", "tasks", "options", "named"),
    [
        ("chat", "gsm8k", {"set": ["sampling.temperature=0"]}, "sampling.samples=1"),
        ("chat", "gsm8k", {"protocol": "harness", "set": ["sampling.samples=3"]}, "sampling.samples"),
        ("chat", "hellaswag", {}, "--protocol harness"),
        ("language_model", "arc_easy", {"protocol": "paper"}, "--protocol harness"),
        ("images", "top1", {"seed": 3}, "--seed"),
        ("images", "knn", {"set": ["linear.steps=3"]}, "linear"),
        ("images", "knn", {"set": ["knn.neighbors=[1]"]}, "neighbours"),
    ],
)
def test_an_option_is_checked_and_never_ignored(tmp_path, objective, tasks, options, named):
    if objective == "images":
        run = open_run(tmp_path, "images", recipe_from_dict(TINY_IMAGES))
    else:
        run = make_run(tmp_path, objective)
    with pytest.raises(UsageError) as error:
        new_request(run, tasks, **options)
    assert named in str(error.value)


def test_mistakes_are_refused_without_torch_and_lm_eval(tmp_path):
    """In a fresh process, which neither loads a model nor imports such a library."""
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
        "--run language_model --protocol paper",
        "--run images --tasks knn --set knn.neighbors=[1]",
    ]
    result = run_process(
        [sys.executable, "-c", code, str(run.path.parent), *wrong], capture_output=True, text=True, cwd=ROOT
    )
    assert result.stdout == "2 []\n" * len(wrong), result.stderr
