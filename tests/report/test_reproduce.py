"""The commands that a page prints are run, and give the run again: the same recipe, the same weights."""

import io
import json
import shlex
import shutil

import pytest
from image_support import image_recipe
from safetensors.torch import load_file
from support import run_main, tiny_chat_recipe, tiny_recipe, train_here, write_text

from lapcli.objectives.loading import find_checkpoint
from lapcli.report.assemble import report_on
from lapcli.report.collect import collect
from lapcli.report.figures import experiments_of
from lapcli.report.grouping import names_in_words
from lapcli.report.reproduce import analysis_commands, commands_of, figure_command, training_command
from lapcli.runs import read_run
from lapcli.runtime.progress import LogConsole
from lapcli.training.stages import train_stages


def told(runs, name):
    return training_command(next(run for run in collect([name], runs).runs if run.name == name))


def weights_of(path):
    tensors = load_file(find_checkpoint(read_run(path), "last").weights)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def run_again(command, before, after, capsys):
    """What the command leaves in `after` is what was in `before`."""
    recipe, weights = (before / "recipe.yaml").read_text(), weights_of(before)
    if before == after:
        shutil.rmtree(before)
    words = shlex.split(command)
    assert words.pop(0) == "lap"
    code, _, err = run_main(capsys, *words)
    assert code == 0, err
    assert (after / "recipe.yaml").read_text() == recipe
    assert weights_of(after) == weights


@pytest.fixture(scope="module")
def talkers(tmp_path_factory, shared_cache):
    """A base GPT on a text of one's own, and both stages of a chat recipe that nobody ships."""
    folder = tmp_path_factory.mktemp("own words")  # a folder with a space in its name
    stages = tiny_chat_recipe(folder, midtrain={"train": {"steps": 2}}, sft={"train": {"steps": 2}})
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LAP_CACHE", str(shared_cache))
        base = train_here(tiny_recipe(write_text(folder / "text.txt"), train={"steps": 2}), folder / "runs", "base")
        train_stages(
            stages, read_run(base.path), runs_dir=folder / "runs", name="base", console=LogConsole(io.StringIO())
        )
    return folder / "runs"


@pytest.mark.parametrize("name", ["base", "base-midtrain", "base-sft"])
def test_a_run_of_ones_own_recipe(talkers, name, capsys):
    run_again(told(talkers, name), talkers / name, talkers / f"{name}-again", capsys)


@pytest.mark.parametrize("stage", ["midtrain", "sft"])
def test_a_stage_of_a_shipped_recipe_is_told_by_its_name(chat_runs, stage, tmp_path, capsys):
    """With what was changed of it; the run itself is moved away, so that the command has to train it."""
    trained, _ = chat_runs
    for name in ("quickstart", "quickstart-midtrain", "quickstart-sft"):
        shutil.copytree(trained / name, tmp_path / name)
    name = f"quickstart-{stage}"
    command = told(tmp_path, name)
    start = "quickstart" if stage == "midtrain" else "quickstart-midtrain"
    assert command.startswith(f"lap sft chat_quickstart --stage {stage} --run {start} --name quickstart --seed ")
    assert f"--set stages.{stage}.train.steps=3" in command
    run_again(command, tmp_path / name, tmp_path / name, capsys)


def test_chat_stages_are_titled_in_words_with_the_names_of_their_data(talkers):
    report = report_on([], talkers)
    titles = [experiment.title for experiment in experiments_of(report.grids)]
    assert "Chat mid-training on chats" in titles
    assert "Chat fine-tuning on chats" in titles
    assert names_in_words(["a"]) == "a"
    assert names_in_words(["a", "b", "c"]) == "a, b and c"
    assert names_in_words(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more"


def test_no_placeholder_is_printed(chat_runs, talkers):
    for folder in (chat_runs[0], talkers):
        for run in collect([], folder).runs:
            for command in commands_of(run):
                assert "RECIPE" not in command
                assert command.endswith(shlex.join(["--runs-dir", str(folder)]))


def test_an_imported_run_is_imported_again(talkers, tmp_path):
    """What it was trained on is not known, so that its recipe cannot be trained."""
    shutil.copytree(talkers / "base", tmp_path / "theirs")
    read_run(tmp_path / "theirs").update(imported_from={"file": "d20/model_000007.pt", "sha256": "0" * 64})
    assert told(tmp_path, "theirs") == f"lap import d20/model_000007.pt --to theirs --runs-dir {tmp_path}"


@pytest.mark.parametrize("options", [["--limit", "7", "--seed", "3"], ["--limit", "7"], []])
def test_an_analysis_of_images_gives_the_same_numbers_again(options, tmp_path, capsys):
    """Of a choice of images, which --seed draws, or of all of them."""
    train_here(image_recipe(train={"steps": 2}), tmp_path, "vit")
    file = tmp_path / "vit" / "analysis" / ("limit-7" if options else "") / "cossim.json"
    analyze = ["analyze", "cossim", "--run", "vit", "--format", "png", "--runs-dir", str(tmp_path)]
    assert run_main(capsys, *analyze, *options)[0] == 0
    measured = json.loads(file.read_text())["runs"]
    (run,) = collect([], tmp_path).runs
    (command,) = analysis_commands(run)
    assert figure_command("cossim", [run]) == command
    file.unlink()
    code, _, err = run_main(capsys, *shlex.split(command)[1:], "--format", "png")
    assert code == 0, err
    assert json.loads(file.read_text())["runs"] == measured
