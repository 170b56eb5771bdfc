import json
import re

import pytest
import typer
from typer.testing import CliRunner

from lapcli.commands.fetch import EXAMPLES, fetch
from lapcli.runtime.errors import UsageError

RECIPE = """
objective: language_model
model: {layers: 1, width: 16, heads: 2, context: 16}
tokenizer: {vocab: 280}
data: {train: TRAIN}
train: {batch: 2, micro_batch: 2, steps: 1}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for name in "ab":
        lines = [json.dumps({"text": f"{name} has text number {i} in it"}) + "\n" for i in range(20)]
        (tmp_path / "text" / f"{name}.jsonl").write_text("".join(lines))
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.replace("TRAIN", str(tmp_path / "text")))
    return path


def run(*arguments):
    app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
    app.command(epilog=EXAMPLES)(fetch)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)


def printed(*arguments):
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    return dict(re.split("  +", line, maxsplit=1) for line in done.stdout.splitlines())


def test_fetch_prints_sizes(recipe, tmp_path):
    rows = printed(recipe)
    assert (rows["documents"], rows["source files"]) == ("40", "2")
    assert int(rows["train tokens"].replace(",", "")) > 0
    assert str(tmp_path / "cache") in rows["folder"]


def test_local_files_replace_those_of_the_recipe(recipe, tmp_path):
    recipe.write_text(RECIPE.replace("{train: TRAIN}", "{train: 'hub:a/b', revision: v1, files: [a.jsonl, b.jsonl]}"))
    rows = printed(recipe, "--data", tmp_path / "text")
    assert (rows["documents"], rows["source files"]) == ("40", "2")


def test_array_jobs_produce_the_same_files_as_one_process(recipe, tmp_path, monkeypatch):
    """In any order, with one part run last and one interrupted; three files in two parts and a held-out file."""
    from lapcli.data.text import tokens

    monkeypatch.setattr(tokens, "PART_BYTES", 1)  # a part for each file
    lines = [json.dumps({"text": f"c has text number {i} in it"}) + "\n" for i in range(20)]
    (tmp_path / "text" / "c.jsonl").write_text("".join(lines))

    def store(cache):
        monkeypatch.setenv("LAP_CACHE", str(cache))
        return lambda: {
            path.relative_to(cache): path.read_bytes() for path in cache.rglob("*.bin") if "unfinished" not in str(path)
        }

    alone = store(tmp_path / "alone")
    expected = printed(recipe)
    shared = store(tmp_path / "shared")
    assert printed(recipe, "--part", "2/2")["parts"] == "1"

    encode = tokens.PartWriter.close

    def stop(*arguments, **facts):
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens.PartWriter, "close", stop)
    assert run(recipe, "--part", "1/2").exit_code
    monkeypatch.setattr(tokens.PartWriter, "close", encode)
    assert len(shared()) == 2  # tokens and documents of the second file
    before = shared()
    assert printed(recipe, "--part", "1/2")["parts"] == "2"
    assert before.items() <= shared().items()
    assert shared() == alone()
    found = printed(recipe)
    assert {**found, "folder": ""} == {**expected, "folder": ""}


@pytest.mark.parametrize("part", ["3/2", "a/b"])
def test_a_part_that_does_not_exist_is_refused(recipe, part):
    assert isinstance(run(recipe, "--part", part).exception, UsageError)
    assert part in str(run(recipe, "--part", part).exception)
