"""Checks of training and of processes: each is seen to fail, with trainings in this process where none has to die."""

import json
import sys
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from support import lap

from lapcli.doctor.processes import _bandwidth, check_equal_ranks, check_restart, check_sigterm, equality
from lapcli.doctor.training import (
    check_loader,
    check_memory,
    check_resume,
    check_same_step,
    check_speed,
    check_waits,
    crops_per_second,
    first_difference,
    images_trained,
    training_checks,
)
from lapcli.doctor.trials import TrialOutcome, TrialTraining, start_trial, train_trial
from lapcli.kinds import TrainingStart
from lapcli.kinds.language_model import LanguageModelKind
from lapcli.planning import plan_training
from lapcli.recipe import find_recipe, load_recipe
from lapcli.runtime.devices import GPUS, Device, this_cpu

pytestmark = pytest.mark.slow  # they train runs


class Killed(Exception):
    pass


def die():
    raise Killed


def here(trial, kind=None):
    """A trial in this process; a death is an exception that nothing catches on its way."""
    try:
        return TrialOutcome([0], [train_trial(trial, kind, die)], "")
    except Killed:
        return TrialOutcome([-9], [{}], "")


def test_the_same_bits_again(tmp_path):
    assert check_same_step(tmp_path, True, "cpu", here).status == "passes"


def another_seed_the_second_time(trial):
    return here(replace(trial, seed=1) if trial.name.endswith("twice") else trial)


def test_other_bits_are_named_by_the_first_parameter(tmp_path):
    found = check_same_step(tmp_path, False, "cpu", another_seed_the_second_time)
    assert found.status == "fails"
    saved = load_file(tmp_path / "runs" / "default-once" / "checkpoints" / "step-000001" / "model.safetensors")
    assert found.numbers["first_difference"] in saved
    (tmp_path / "cuda").mkdir()
    again = check_same_step(tmp_path / "cuda", False, "cuda", another_seed_the_second_time)
    assert again.status == "passes"
    assert "train.deterministic" in again.text


def forgetful(trial):
    """Whoever resumes has lost the momentum."""
    if trial.name == "killed" and trial.die_before_step is None:
        from support import edit_checkpoint

        (saved,) = trial.checkpoints.glob("step-*")
        edit_checkpoint(saved, "optimizer.safetensors", lambda state: [x.zero_() for x in state.values()])
    return here(trial)


def test_a_run_that_resumes_otherwise(tmp_path):
    found = check_resume(tmp_path, forgetful)
    assert found.status == "fails"
    assert "differs from an uninterrupted one, first in" in found.text


def test_a_run_that_does_not_die(tmp_path):
    found = check_resume(tmp_path, lambda trial: here(replace(trial, die_before_step=None)))
    assert (found.status, "it finished" in found.text) == ("fails", True)


def test_a_killed_process_resumes(tmp_path):
    """The real one, in processes of their own."""
    killed = start_trial(TrialTraining(str(tmp_path), "killed", 4, die_before_step=2))
    assert killed.codes == [-9]
    assert killed.failure() == "rank 0 was ended by SIGKILL"
    assert here(TrialTraining(str(tmp_path), "killed", 4)).seen[0]["waits"] is not None


def test_first_difference(tmp_path):
    import torch

    for name, value in (("one", 0.0), ("other", -0.0)):
        (tmp_path / name).mkdir()
        for file in ("model", "optimizer"):
            save_file({"a": torch.zeros(2), "b": torch.full((2,), value)}, tmp_path / name / f"{file}.safetensors")
    assert first_difference(tmp_path / "one", tmp_path / "one") is None
    assert first_difference(tmp_path / "one", tmp_path / "other") == "b"  # equal numbers, other bits


class Curious(LanguageModelKind):
    """A kind whose loss is looked at in every micro-step."""

    def start(self, recipe, world, run):
        start = super().start(recipe, world, run)
        loss = start.objective.loss

        def looked_at(batch):
            value = loss(batch)
            assert float(value.detach()) > 0
            return value

        start.objective.loss = looked_at
        return TrainingStart(start.objective, start.facts, start.notes)


def test_waits_of_the_host(tmp_path):
    assert check_waits(tmp_path, here).status == "passes"
    (tmp_path / "curious").mkdir()
    found = check_waits(tmp_path / "curious", lambda trial: here(trial, Curious()))
    assert found.status == "warns"
    assert found.numbers["waits"] >= 3


PLAN = {
    "device": "H100",
    "precision": "bf16",
    "flops_per_step": 10**14,
    "memory_total": 10**9,
    "step_time": {"seconds": 0.2, "share_of_peak": 0.5},
}


def test_speed_and_memory():
    fine = {**PLAN, "probe": {"memory": 1.1e9, "seconds_per_step": 0.2}}
    slow = {**PLAN, "probe": {"memory": 1.4e9, "seconds_per_step": 2.0}}
    assert check_speed(fine, GPUS["h100"]).numbers["share_of_peak"] == pytest.approx(5e14 / 989e12)
    assert [check_speed(plan, GPUS["h100"]).status for plan in (fine, slow)] == ["passes", "warns"]
    assert check_speed(slow, this_cpu()).status == "passes"
    # Above the least share of the peak, and yet far from what the plan expects.
    late = {**fine, "step_time": {"seconds": 0.1, "share_of_peak": 1.0}}
    found = check_speed(late, GPUS["h100"])
    assert (found.status, found.numbers["planned_seconds"]) == ("warns", 0.1)
    assert "`lap plan` expects 0.1 s" in found.text
    assert [check_memory(plan).status for plan in (fine, slow)] == ["passes", "fails"]


def test_a_mac_is_not_asked_for_what_it_does_not_have(tmp_path):
    """Apple's GPUs have no deterministic algorithms, and a process there holds libraries too, as on the CPU."""
    mac = Device("mps", "mps", None)
    names = {check.name for check in training_checks(tmp_path, mac, 0)}
    assert {check.name for check in training_checks(tmp_path, this_cpu(), 0)} - names == {
        "... deterministic",
        "killed and resumed",
    }
    found = check_same_step(tmp_path, False, "mps", another_seed_the_second_time)
    assert found.status == "passes"
    plan = {"device": "mps", "memory_total": 100e6, "probe": {"memory": 250e6}}
    assert check_memory(plan).status == "passes"


def test_reading_images():
    recipe = load_recipe(find_recipe("dino_vits"))
    assert crops_per_second(recipe, 1) > 0
    found = check_loader(GPUS["l40"], 4, 16, lambda recipe: 24.0, lambda recipe, device: 400.0)
    assert found.status == "warns"
    assert (found.numbers["wanted"], found.numbers["cores_wanted"]) == (1600, 67)
    assert check_loader(GPUS["l40"], 4, 67, lambda recipe: 24.0, lambda recipe, device: 400.0).status == "passes"
    assert check_loader(this_cpu(), 0, 2, lambda recipe: 24.0).status == "passes"


@pytest.mark.slow
def test_what_a_gpu_trains_on_is_what_the_plan_says():
    recipe = load_recipe(find_recipe("dino_vits"))
    planned = plan_training(recipe, 4, GPUS["l40"]).step_time
    assert 4 * images_trained(recipe, GPUS["l40"]) == pytest.approx(planned.examples_per_second, rel=0.05)


def test_ranks_are_equal_and_a_dead_one_is_named(tmp_path):
    bandwidth, weights = check_equal_ranks(tmp_path, 2, "cpu")
    assert (bandwidth.status, weights.status) == ("passes", "passes"), (bandwidth, weights)
    dying = TrialTraining(str(tmp_path), "dying", 5, "cpu", ranks=2, die_before_step=2, die_rank=1)
    for found in check_equal_ranks(tmp_path, 2, "cpu", trial=dying):
        assert found.status == "fails"
        assert "rank 1 was ended by SIGKILL" in found.text or "rank 0" in found.text


def test_a_slow_exchange():
    """16 MiB over two processes: each byte is sent once."""
    for seconds, status in ((1e-3, "passes"), (10.0, "warns")):
        outcome = TrialOutcome([0, 0], [{"exchange_seconds": 1e-4}, {"exchange_seconds": seconds}], "")
        found = _bandwidth(outcome, 16 * 2**20, 2, "cpu")
        assert (found.status, found.numbers["bytes_per_second"]) == (status, pytest.approx(16 * 2**20 / seconds))


def test_another_rank():
    assert equality(["a", "a"]).status == "passes"
    assert "rank 2 has other weights" in equality(["a", "a", "b"]).text


def test_sigterm(tmp_path):
    assert check_sigterm(tmp_path, 1, "cpu").status == "passes"


def stand_in(folder, ending):
    """A command that writes metrics as a run does, and ends in its own way."""
    lines = [
        "import os, pathlib, signal, sys, time",
        ending,
        f"run = pathlib.Path({str(folder)!r}); run.mkdir(parents=True)",
        "(run / 'run.json').write_text('{\"step\": 4}')",
        "(run / 'metrics.jsonl').write_text('{}\\n' * 9)",
        "time.sleep(600)",
    ]
    return [sys.executable, "-c", "\n".join(lines)]


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(0))", "it ends with 0"),
        ("signal.signal(signal.SIGTERM, lambda *_: os._exit(75))", "no complete checkpoint"),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "it does not end"),
        ("sys.exit('out of memory')", "ended with 1: out of memory"),
    ],
)
def test_a_wrong_end_after_sigterm(tmp_path, ending, said):
    hang = 10 if "IGN" in ending else 900  # the one that never ends is waited for in full
    found = check_sigterm(tmp_path, 1, "cpu", stand_in(tmp_path / "runs" / "interrupted", ending), hang=hang)
    assert found.status == "fails"
    assert said in found.text


def test_a_dead_rank_without_a_restart(tmp_path):
    found = check_restart(tmp_path, 2, "cpu", restarts=0)
    assert found.status == "fails"
    assert "was ended by SIGKILL" in found.text


def test_the_command(shared_cache):
    result = lap("doctor", "--only", "environment", "--json", cache=shared_cache)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["fails"] == 0
    assert {check["section"] for check in found["checks"]} == {"environment"}
    assert all(check["name"] in result.stderr for check in found["checks"])
    assert lap("doctor", "--only", "processes", "--nproc", "1", cache=shared_cache).returncode == 2
