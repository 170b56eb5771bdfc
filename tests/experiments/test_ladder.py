"""Ladders with runs of a few steps, trained in this process; the referee has its own tests."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from support import run_main, train_here
from sweep_support import write_recipe

from lapcli.experiments.ladder import Ladder, LadderChooser, fit_optimum
from lapcli.experiments.runner import Runner, failure
from lapcli.experiments.verdicts import answer
from lapcli.recipe import find_recipe, load_recipe
from lapcli.runtime.devices import GPUS
from lapcli.runtime.errors import ExitCode, LapError, UsageError
from lapcli.training import metrics

FILE = {
    "base": "tiny.yaml",
    "rungs": {
        "a": {"model.layers": 1, "model.width": 16},
        "b": {"model.layers": 2, "model.width": 16},
        "c": {"model.layers": 2, "model.width": 32},
    },
    "arms": {"plain": {"model.laplacian_heads": 0}, "laplacian": {"model.operators": {"laplacian": "half"}}},
    "tokens_per_parameter": 0.2,
    "tune": {"over": {"optimizer.lr": [0.01, 0.04]}, "on": ["a"]},
    "pairs": {"a": 2, "b": 1, "c": 1},
    "controls": ["a"],
    "held_out": "c",
    "outcome": "validation_loss",
    "margin": 0.01,
}


class Here:
    """A finished cell process: the training ran in this process."""

    pid = 0

    def __init__(self, words, log, lock, environment):
        given = dict(zip(words[2::2], words[3::2], strict=True))
        sets = [value for word, value in zip(words[2::2], words[3::2], strict=True) if word == "--set"]
        try:
            train_here(load_recipe(words[1], sets), Path(given["--runs-dir"]), given["--name"])
            self.code = int(ExitCode.DONE)
        except LapError as error:
            self.code = int(error.exit_code)

    def poll(self):
        return self.code

    wait = poll

    def send_signal(self, sig):
        pass


def write_ladder(folder, **changes):
    write_recipe(folder, validation={"every": 100, "prompts": []}, schedule={"warmdown": 0.4})
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**FILE, **changes}, sort_keys=False))
    return path


def climb(path, runs):
    ladder = Ladder(path, runs)
    statuses = Runner(LadderChooser(ladder), runs, tell=lambda text: None, start=Here).run()
    if error := failure(statuses):
        raise error
    return ladder


def untimed(told):
    """The results that do not depend on timing."""
    text = json.loads(json.dumps(told, default=str))
    for finding in [*text["findings"].values(), *text["at_the_shared_rate"].values()]:
        for rung in finding["rungs"]:
            rung.pop("time_multiplier")
    for rung in (rung for rungs in text["pairs"].values() for rung in rungs):
        del rung["baseline_seconds"], rung["arm_seconds"]
    del text["text"]
    return text


def test_a_ladder_from_tuning_to_its_files(tmp_path, capsys):
    path, runs = write_ladder(tmp_path), tmp_path / "runs"
    ladder = climb(path, runs)
    told = answer(ladder)
    phases = [cell["phase"] for cell in told["cells"]]
    assert {phase: phases.count(phase) for phase in phases}.items() >= {"tuning": 4, "A/A": 2, "pairs": 6}.items()
    assert phases[-2:] == ["held out"] * 2
    assert all(cell["state"] == "finished" for cell in told["cells"])
    # The referee received the runs' validation losses, paired by seed at each arm's own learning rate.
    rate = ladder.carried("laplacian", "optimizer.lr", "a")
    for seed in (0, 1):
        summary = json.loads((runs / f"small-a-laplacian-lr{rate:g}-seed{seed}" / "summary.json").read_text())
        assert told["pairs"]["laplacian"][0]["arm"][seed] == summary["end"]["validation_loss"]
    assert set(told["verdicts"]) == {"laplacian", "A/A"}
    assert "Holm" in told["text"]
    # For the plain model, the mean eigenvalue of W_O W_V over a layer's heads is its trace divided by the width.
    (base,) = {c["cell"] for c in told["cells"] if (c["phase"], c["rung"], c["arm"]) == ("held out", "c", "plain")}
    weights = load_file(max((runs / base / "checkpoints").iterdir()) / "model.safetensors")
    attention = [[weights[f"blocks.{layer}.attn.{name}.weight"] for name in ("out", "v")] for layer in range(2)]
    traces = [float(torch.trace(out @ value)) / 32 for out, value in attention]
    assert told["plain_models"]["c"]["eigenvalue of OV"] == pytest.approx(traces, abs=1e-5)
    assert all(0 < mass < 1 for mass in told["plain_models"]["a"]["to the first token"])
    for name in ("differences.png", "differences.svg", "differences.csv", "outcomes.png"):
        assert (runs / ".ladders" / "small" / name).stat().st_size > 50
    # The same command reads the result again without training.
    code, out, _ = run_main(capsys, "ladder", str(path), "--runs-dir", str(runs), "--json")
    assert (code, untimed(json.loads(out))) == (0, untimed(told))
    assert json.loads((runs / ".ladders/small/ladder.json").read_text()) == json.loads(out)
    report = run_main(capsys, "report", "--runs-dir", str(runs))[1]
    assert told["verdicts"]["laplacian"].split(" (")[0] in report


@pytest.mark.long
def test_interruptions_in_each_kind_of_cell_change_nothing(tmp_path, monkeypatch):
    path = write_ladder(tmp_path)
    undisturbed = untimed(answer(climb(path, tmp_path / "undisturbed")))
    victims = {
        next(c["cell"] for c in undisturbed["cells"] if c["phase"] == p) for p in ("tuning", "pairs", "held out")
    }
    stopped = []

    def stop(file, line):
        if file.parent.name in victims - set(stopped) and line["step"] == 1:
            stopped.append(file.parent.name)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(metrics, "listeners", [*metrics.listeners, stop])
    for _ in victims:
        with pytest.raises(LapError) as error:
            climb(path, tmp_path / "runs")
        assert error.value.exit_code == ExitCode.INTERRUPTED
    assert untimed(answer(climb(path, tmp_path / "runs"))) == undisturbed
    assert set(stopped) == victims


def test_an_identical_arm_differs_by_exactly_zero(tmp_path):
    same = {"model.operators": {"mix": {"heads": "all", "alpha": 0.0, "beta": 1.0}}}
    changes = {"arms": {"plain": {"model.laplacian_heads": 0}, "same": same}, "controls": [], "tune": None}
    path = write_ladder(tmp_path, **changes, pairs={"a": 2}, held_out=None)
    told = answer(climb(path, tmp_path / "runs"))
    (rung,) = told["findings"]["same"]["rungs"]
    assert (rung["difference"]["value"], told["findings"]["same"]["verdict"]) == (0.0, "no effect")
    assert rung["pairs"] == 2


def test_a_diverged_run_is_reported_and_not_averaged(tmp_path):
    wild = dict.fromkeys(("optimizer.lr", "optimizer.head_lr", "optimizer.weight_decay"), 1e6) | {
        "optimizer.clip": None
    }
    arms = {"plain": {"model.laplacian_heads": 0}, "wild": wild}
    changes = {"controls": [], "tune": None, "pairs": {"b": 1}, "held_out": None, "tokens_per_parameter": None}
    path = write_ladder(tmp_path, arms=arms, **changes)
    told = answer(climb(path, tmp_path / "runs"))
    assert {cell["arm"]: cell["state"] for cell in told["cells"]} == {"plain": "finished", "wild": "diverged"}
    assert "wild" not in told["findings"]
    assert any("small-b-wild-seed0" in note for note in told["notes"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"margins": 1}, "margins"),
        ({"pairs": {"a": 2, "z": 2}}, '"z"'),
        ({"held_out": "z"}, '"z"'),
        ({"tune": {"over": {"optimizer.lr": [0.1, 0.2]}, "on": ["c"]}}, "held out"),
        ({"outcome": "validation_top1"}, "validation_bits_per_byte"),
        ({"arms": {"plain": {}, "odd": {"model.hats": 1}}}, "hats"),
        ({"rungs": {**FILE["rungs"], "b": {"model.width": 15}}}, "heads 4"),
    ],
)
def test_faults_of_a_file_are_named_with_their_lines(changes, words, tmp_path, capsys):
    path = write_ladder(tmp_path, **changes)
    code, out, err = run_main(capsys, "ladder", str(path), "--dry-run", "--runs-dir", str(tmp_path / "runs"))
    assert (code, out) == (2, "")
    lines = path.read_text().splitlines()
    (line,) = [line for line in err.splitlines() if words in line][:1]
    number = int(line.split("small.yaml:")[1].split()[0])
    key = next(iter(changes))
    assert lines[number - 1].startswith(key) or lines[number - 1].startswith(" ")
    assert not (tmp_path / "runs").exists()


def test_heads_scale_with_the_rung_and_steps_with_the_parameters(tmp_path):
    rungs = {"a": {"model.heads": 2, "model.width": 16}, "b": {"model.heads": 4, "model.width": 32}}
    arms = {
        "plain": {"model.laplacian_heads": 0},
        "half": {"model.laplacian_heads": "half"},
        "most": {"model.operators": {"laplacian": {"heads": 0.75, "layers": "0"}}},
    }
    changes = {"rungs": rungs, "arms": arms, "tune": None, "held_out": None, "pairs": {"a": 2, "b": 2}, "controls": []}
    ladder = Ladder(write_ladder(tmp_path, **changes, tokens_per_parameter=20), tmp_path / "runs")
    plans = {(r, a): ladder.cell(r, a, 0, {}).loaded.model.head_plan().per_layer for r in rungs for a in arms}
    assert [plans[rung, "half"] for rung in rungs] == [(1, 1), (2, 2)]
    assert [plans[rung, "most"] for rung in rungs] == [(2, 0), (3, 0)]
    matrices = 2 * 12 * 32**2 + 300 * 32  # two blocks and the head
    assert ladder.cell("b", "half", 0, {}).loaded.train.steps == round(20 * matrices / (8 * 32))


def test_the_optimum_of_a_parabola_inside_and_outside_the_values():
    values = [0.01, 0.02, 0.04, 0.08, 0.16]
    found = fit_optimum({value: (np.log2(value / 0.05)) ** 2 for value in values})
    assert (found.value, found.is_bracketed) == (pytest.approx(0.05, rel=0.1), True)
    # Two minima: near the best value, not between them (parabola through three points, by hand: 2^-0.17 of 0.08).
    dips = fit_optimum({0.02: 2.362, 0.04: 2.397, 0.08: 2.351, 0.16: 2.445})
    assert dips.value == pytest.approx(0.08 * 2**-0.17, rel=0.1)
    assert fit_optimum({0.01: 3.0, 0.02: 2.0, 0.04: 1.0})[::2] == (0.04, False)
    assert fit_optimum({0.01: 3.0, 0.02: 2.0, 0.04: None})[::2] == (0.02, True)


def test_the_cost_is_printed_first_and_a_budget_omits_rungs(tmp_path):
    ladder = Ladder(find_recipe("ladders/gpt_gpu"), tmp_path)
    rungs = {rung["rung"]: rung for rung in ladder.cost(GPUS["l40"])["rungs"]}
    hours = sum(rung["hours_left"] for name, rung in rungs.items() if name != "d12")
    assert hours == pytest.approx(18.8, rel=0.2)  # as estimated by hand from parameters and tokens
    # 503 million tokens, 12 for each of the 42 million parameters.
    assert rungs["d8"]["flops"] == pytest.approx(1.5e17, rel=0.05)
    said = ladder.keep_within(8.0, GPUS["l40"])
    assert ladder.rungs == ["d4", "d6"]
    assert "d8, d10, d12 left out" in said
    with pytest.raises(UsageError):
        ladder.keep_within(0.1, GPUS["l40"])
