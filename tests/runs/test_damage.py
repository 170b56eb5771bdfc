"""Damage to any file of a run: each command gives the result of the whole run, or refuses with exit code 2.

Damages are drawn by a seed, which a failure prints; LAP_DAMAGE_SEED repeats it.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from image_support import image_recipe
from support import die_at, exit_code, randomise_weights, start_child, tiny_recipe, train_here, write_text

from lapcli.cli import main
from lapcli.kinds.opening import find_checkpoint, open_run
from lapcli.models.gpt import GPT
from lapcli.recipe import recipe_to_dict, recipe_to_yaml
from lapcli.runs import newest_run, read_run
from lapcli.runtime.errors import UsageError
from lapcli.sweep.grid import Cell
from lapcli.sweep.state import last_validation, progress
from lapcli.training import checkpoint
from lapcli.training.metrics import read_metrics, without_times

SEED = int(os.environ.get("LAP_DAMAGE_SEED") or (0 if os.environ.get("CI") else random.randrange(2**32)))
SMALL = {"layers": 1, "width": 8, "heads": 2, "laplacian_heads": 1}


class Refused(Exception):
    """Exit code 2."""


def lap(*arguments: str) -> tuple[str, str]:
    """What a command prints, run in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["lap", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    if code == 2:
        raise Refused(err.getvalue())
    assert code == 0, err.getvalue()
    return out.getvalue(), err.getvalue()


def flip_a_bit(content: bytearray, draw: random.Random) -> bytes:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def another_digit(content: bytearray, draw: random.Random) -> bytes:
    """What no parser can notice."""
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit() and byte < 128]
    if digits:
        content[draw.choice(digits)] = ord(draw.choice("0123456789"))
    return bytes(content)


def another_letter(content: bytearray, draw: random.Random) -> bytes:
    letters = [place for place, byte in enumerate(content) if chr(byte).isalpha() and byte < 128]
    if letters:
        content[draw.choice(letters)] = ord(draw.choice("abcdefghijklmnopqrstuvwxyz"))
    return bytes(content)


def lost_bytes(content: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    del content[start : start + draw.choice([1, 2, 10, 100, 4096])]
    return bytes(content)


def cut_short(content: bytearray, draw: random.Random) -> bytes:
    return bytes(content[: draw.randrange(len(content))])


def a_block_of_zeros(content: bytearray, draw: random.Random) -> bytes:
    start = draw.randrange(len(content))
    end = min(len(content), start + draw.choice([1, 16, 512]))
    content[start:end] = bytes(end - start)
    return bytes(content)


def a_line_lost_or_doubled(content: bytearray, draw: random.Random) -> bytes:
    lines = bytes(content).splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place : place + 1] = draw.choice([[], [lines[place]] * 2])
    return b"".join(lines)


def lines_swapped(content: bytearray, draw: random.Random) -> bytes:
    lines = bytes(content).splitlines(keepends=True)
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def more_bytes(content: bytearray, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    content[place:place] = draw.choice([b"0", b" ", b"\n", b"1\n", b"\x00", bytes(content[:50])])
    return bytes(content)


DAMAGES = [
    flip_a_bit,
    another_digit,
    another_letter,
    lost_bytes,
    cut_short,
    a_block_of_zeros,
    a_line_lost_or_doubled,
    lines_swapped,
    more_bytes,
]


def do_damage(path: Path, draw: random.Random) -> str:
    """To the file, which keeps its times; says what it was."""
    whole, times = path.read_bytes(), path.stat()
    while True:
        damage = draw.choice(DAMAGES)
        content = damage(bytearray(whole), draw)
        if content != whole:
            break
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{damage.__name__} in {path.name}"


@contextlib.contextmanager
def damaged(path: Path, draw: random.Random):
    """Inside, the file is damaged."""
    whole, times = path.read_bytes(), path.stat()
    try:
        yield do_damage(path, draw)
    finally:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def state_of(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_cache):
    """A finished GPT with an analysis, and a finished classifier with an evaluation that a sweep asked for."""
    folder = tmp_path_factory.mktemp("damage")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LAP_CACHE", str(shared_cache))
        text = tiny_recipe(
            write_text(folder / "text.txt"),
            model={**SMALL, "context": 16},
            train={"steps": 4},
            validation={"every": 2},
            checkpoint={"every": 2},
        )
        images = image_recipe(model=SMALL, train={"steps": 4}, validation={"every": 2}, checkpoint={"every": 2})
        for name, recipe in (("text", text), ("images", images)):
            train_here(recipe, folder / "runs", name)
            (folder / f"{name}.yaml").write_text(recipe_to_yaml(recipe))
        lap("eval", "--run", "images", "--runs-dir", str(folder / "runs"), "--tasks", "top1")
        lap("analyze", "cossim", "--run", "text", "--runs-dir", str(folder / "runs"), "--limit", "4")
        checked = {"eval --tasks top1": read_run(folder / "runs" / "images").info["weights_sha256"], "search": False}
        from lapcli.runtime.files import write_checked_json

        write_checked_json(folder / "runs" / "images" / "sweep.json", checked)
    return folder


class Readers:
    """Every way in which a command takes something from the runs; each gives what it read, or is refused."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"

    def report(self, name):
        return lap("report", "--runs-dir", str(self.runs), "--format", "json")

    def report_on_the_best(self, name):
        return lap("report", "--runs-dir", str(self.runs), "--format", "json", "--checkpoint", "best")

    def page(self, name):
        lap("report", "--runs-dir", str(self.runs), "--format", "csv")
        from lapcli.report.collect import collect

        return [(run.curve, run.series, run.by_layer, run.status) for run in collect([], self.runs).runs]

    def train(self, name):
        recipe = str(self.folder / f"{name}.yaml")
        printed, said = lap("train", recipe, "--runs-dir", str(self.runs), "--name", name, "--json")
        return json.loads(printed), said  # the order of keys carries no meaning: two lines of run.json may be swapped

    def last_weights(self, name):
        return self._load(name, "last")

    def best_weights(self, name):
        return self._load(name, "best" if name == "images" else "2")

    def _load(self, name, which):
        run = read_run(self.runs / name)
        saved = find_checkpoint(run, which)
        loaded = open_run(run, saved, torch.device("cpu"))
        tokens = None
        if loaded.tokenizer:
            words = [loaded.tokenizer.decode_bytes([number]) for number in range(loaded.tokenizer.vocab_size)]
            tokens = words, loaded.tokenizer.encode((self.folder / "text.txt").read_text()[:2000] + "It's  3,141\n\n")
        return saved.step, saved.weights_sha256, state_of(loaded.module), tokens, recipe_to_dict(run.recipe)

    def evaluate(self, name):
        if name == "text":  # lm-eval takes seconds to import; what it is given is read by `last_weights`
            return self.last_weights(name)
        return lap("eval", "--run", name, "--runs-dir", str(self.runs), "--tasks", "top1", "--json")

    def newest(self, name):
        run = newest_run(self.runs, {"language_model", "classification"})
        return run.name, run.info, recipe_to_dict(run.recipe)

    def sweep(self, name):
        recipe = read_run(self.runs / name).recipe
        cell = Cell(name, Path("r.yaml"), (), {}, recipe, ("eval --tasks top1",))
        return progress(cell, self.runs), last_validation(cell, self.runs)


#: Which readers look at a file; of the others nothing is expected.
LOADING = ["last_weights", "best_weights", "evaluate"]
TABLES = ["report", "report_on_the_best", "page"]
ALL = [*TABLES, *LOADING, "train", "newest", "sweep"]
LOOKED_AT_BY = {
    "run.json": ALL,
    "recipe.yaml": ALL,
    "summary.json": [*TABLES, "train", "best_weights", "sweep"],
    "metrics.jsonl": [*TABLES, "train"],
    "tokenizer.json": [*LOADING, "train"],
    "sweep.json": [*TABLES, "sweep"],
    "eval": TABLES,
    "analysis": TABLES,
    "checkpoints": [*LOADING, "train"],
}


def files_of(run: Path) -> list[Path]:
    """All that a command reads; figures and tables for people are out of it, and so are answers kept for a resume."""
    found = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix in {".json", ".jsonl", ".yaml"}]
    return [*found, *sorted(run.rglob("*.safetensors"))]


@pytest.mark.parametrize("part", range(8))
def test_a_command_gives_the_whole_result_or_refuses(runs, part):
    """Four hundred damages in all; the same reader before and after."""
    print(f"LAP_DAMAGE_SEED={SEED}")
    draw = random.Random(f"{SEED} {part}")
    readers = Readers(runs)
    whole: dict[tuple[str, str], object] = {}
    refused = 0
    for number in range(50):
        name = draw.choice(["text", "images"])
        folder = runs / "runs" / name
        path = draw.choice(files_of(folder))
        known = LOOKED_AT_BY[path.relative_to(folder).parts[0]]
        reader = draw.choice(known)
        read = getattr(readers, reader)
        if (reader, name) not in whole:
            whole[reader, name] = read(name)
        with damaged(path, draw) as damage:
            try:
                found = read(name)
            except (UsageError, Refused):
                refused += 1
                continue
            said = f"LAP_DAMAGE_SEED={SEED}, part {part}, number {number}: {reader} of {name} after {damage}"
            assert found == whole[reader, name], said
    assert refused > 10  # most damages matter


def test_reading_changes_no_run(runs):
    files = [
        path for name in ("text", "images") for path in files_of(runs / "runs" / name) if path.parent.name != "eval"
    ]
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in files]
    for reader in ALL:
        for name in ("text", "images"):
            getattr(Readers(runs), reader)(name)
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in files] == before


@pytest.mark.parametrize("which", ["last", "best"])
def test_an_older_checkpoint_does_not_stand_for_a_missing_one(runs, tmp_path, which):
    shutil.copytree(runs / "runs" / "images", tmp_path / "images")
    run = read_run(tmp_path / "images")
    path = find_checkpoint(run, which).path
    path.rename(path.with_name("step-000001"))  # there is another one
    arguments = ["--run", "images", "--runs-dir", str(tmp_path), "--tasks", "top1", "--checkpoint", which]
    with pytest.raises(Refused, match=r"is not the checkpoint that the run ended with|\(step \d+\) is missing"):
        lap("eval", *arguments)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(Refused, match="has no checkpoint any more"):
        lap("eval", *arguments)
    run.metrics.unlink()
    _, said = lap("train", str(runs / "images.yaml"), "--runs-dir", str(tmp_path), "--name", "images")
    assert said.count("is finished, but") == 2
    assert f"{run.metrics} is missing" in said


def after(run: Path):
    """What a training leaves, but for times."""
    found = read_run(run)
    (last, *_) = reversed(checkpoint.steps_in(found.checkpoints))
    saved = find_checkpoint(found, "last")
    assert saved.step == last
    lines = [without_times(line) for line in read_metrics(found.metrics)]
    summary = {k: v for k, v in json.loads((run / "summary.json").read_text()).items() if k != "sha256"}
    tokenizer = (run / "tokenizer.json").read_bytes()
    return saved.weights_sha256, lines, summary, tokenizer, found.info["data_sha256"]


@pytest.fixture(scope="module")
def killed(tmp_path_factory, runs):
    """A run that was killed after its second checkpoint, its cache, its recipe, and what it leaves without a kill."""
    folder = tmp_path_factory.mktemp("killed")
    recipe = tiny_recipe(
        runs / "text.txt",
        model={**SMALL, "context": 16},
        train={"steps": 5},
        validation={"every": 2},
        checkpoint={"every": 2, "keep": 1},
    )
    assert exit_code(start_child(recipe, folder / "whole", folder / "cache")) == 0
    child = start_child(recipe, folder / "runs", folder / "cache", die_at, "after rename", 2)
    assert exit_code(child) == -signal.SIGKILL
    return folder, recipe, after(folder / "whole" / "run")


def test_a_run_without_its_metrics_is_resumed_and_says_what_is_lost(runs, tmp_path, shared_cache):
    recipe = image_recipe(model=SMALL, train={"steps": 4}, validation={"every": 2}, checkpoint={"every": 2})
    assert exit_code(start_child(recipe, tmp_path, shared_cache, die_at, "after rename", 1)) == -signal.SIGKILL
    (tmp_path / "run" / "metrics.jsonl").unlink()
    log = io.StringIO()
    run = train_here(recipe, tmp_path, log=log)
    assert "metrics.jsonl is missing: losses and validations up to step 2 are lost" in log.getvalue()
    assert find_checkpoint(run, "last").weights_sha256 == read_run(runs / "runs" / "images").info["weights_sha256"]
    assert [line["step"] for line in read_metrics(run.metrics) if "loss" in line] == [3, 4]
    with pytest.raises(UsageError, match="no best checkpoint"):  # nobody knows which one it was
        find_checkpoint(run, "best")
    train_here(recipe, tmp_path)


def test_another_text_does_not_replace_the_tokenizer_of_a_run(killed, tmp_path, monkeypatch):
    folder, recipe, _ = killed
    shutil.copytree(folder / "runs", tmp_path / "runs")
    monkeypatch.setenv("LAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    text = Path(recipe.data.train)
    tokenizer, whole = tmp_path / "runs" / "run" / "tokenizer.json", text.read_text()
    before = tokenizer.read_bytes()
    try:
        text.write_text(whole.replace("cat", "cow"))
        with pytest.raises(UsageError, match="has changed since it began"):
            train_here(recipe, tmp_path / "runs")
    finally:
        text.write_text(whole)
    assert tokenizer.read_bytes() == before


def test_a_resumed_run_ends_as_the_whole_one_or_is_refused(killed, tmp_path, monkeypatch):
    """Damages of the run and of the cached tokens, and none at all."""
    folder, recipe, expected = killed
    monkeypatch.setattr(GPT, "initialise", GPT.initialise)
    randomise_weights()  # as in the child that was killed
    print(f"LAP_DAMAGE_SEED={SEED}")
    draw = random.Random(f"{SEED} resumed")
    refused = 0
    for number in range(41):
        place = tmp_path / str(number)
        shutil.copytree(folder / "runs", place / "runs")
        shutil.copytree(folder / "cache", place / "cache")
        monkeypatch.setenv("LAP_CACHE", str(place / "cache"))
        cached = [path for path in sorted((place / "cache").rglob("*")) if path.is_file() and path.stat().st_size]
        files = [*files_of(place / "runs" / "run"), *cached]
        damage = do_damage(draw.choice(files), draw) if number else "nothing"
        try:
            train_here(recipe, place / "runs")
        except UsageError:
            refused += 1
        else:
            said = f"LAP_DAMAGE_SEED={SEED}, resumed, number {number}: after {damage}"
            assert after(place / "runs" / "run") == expected, said
        shutil.rmtree(place)
        assert number or not refused, "a run without any damage is resumed"
    assert refused  # by how many of the 40 depends on the seed: by 3 with 2262930484
