"""Training on this machine: reproducible bits, a run that is killed and resumed, waits of the host, speed, memory.

Speed and memory are measured by `lap plan --probe` on two layers of the paper's GPT, or of a small GPT on the CPU, and
compared with the plan itself.
"""

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from lapcli.data.images.crops import CropReader
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example
from lapcli.doctor.checks import REPORT, Check, Finding, fails, passes, warns
from lapcli.doctor.trials import TrialOutcome, TrialTraining, start_trial
from lapcli.planning import plan_training
from lapcli.recipe import find_recipe, load_recipe
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.runtime.devices import Device
from lapcli.runtime.machine import usable_cores

Start = Callable[[TrialTraining], TrialOutcome]
#: Waits of the host in a step: one for the loss, the norm of the gradient and whether to stop.
MOST_WAITS = 1
#: Measured over planned memory; a run with more may not fit although the plan says so.
MOST_MEMORY = 1.15
#: Bytes: a process, which is measured without CUDA, also holds the pages of libraries that its first step reads.
LIBRARIES = 200 * 10**6
#: Share of the GPU's peak below which something is slower than it should be; for CPUs nothing is expected.
LEAST_SHARE = 0.25
#: Measured over planned seconds; the plan is only arithmetic.
MOST_SECONDS = 1.5
SMALL = {
    "model.width": 256,
    "model.heads": 4,
    "model.kv_heads": 4,
    "model.context": 256,
    "tokenizer.vocab": 4096,
    "train.batch": 8,
    "train.micro_batch": 8,
}
REAL = {"train.batch": 16, "train.micro_batch": 16}


def check_same_step(folder: Path, deterministic: bool, device_type: str, start: Start = start_trial) -> Finding:
    """Train one step twice. On a GPU without `train.deterministic` the last bits may differ; elsewhere they may not."""
    name = "deterministic" if deterministic else "default"
    trials = [
        TrialTraining(str(folder), f"{name}-{turn}", 1, deterministic=deterministic) for turn in ("once", "twice")
    ]
    for trial in trials:
        if failure := start(trial).failure():
            return fails(failure, REPORT)
    differing = first_difference(*(trial.checkpoints / "step-000001" for trial in trials))
    if differing is None:
        return passes("one step, trained twice, gives the same bits", first_difference=None)
    if device_type != "cpu" and not deterministic:
        avoided = "; train.deterministic=true avoids that" if device_type == "cuda" else ""
        return passes(f"the last bits differ, first in {differing}{avoided}", first_difference=differing)
    return fails(f"one step, trained twice, differs first in {differing}", REPORT, first_difference=differing)


def check_resume(folder: Path, start: Start = start_trial) -> Finding:
    """Compare six steps with three, SIGKILL, and three more, with `train.deterministic`."""
    whole = TrialTraining(str(folder), "whole", 6, deterministic=True)
    killed = replace(whole, name="killed", die_before_step=3)
    if failure := start(whole).failure():
        return fails(failure, REPORT)
    first = start(killed)
    if first.codes != [-9]:
        return fails(f"the run did not end by SIGKILL as planned: {first.failure() or 'it finished'}", REPORT)
    if failure := start(replace(killed, die_before_step=None)).failure():
        return fails(f"the killed run does not resume: {failure}", REPORT)
    differing = first_difference(*(trial.checkpoints / "step-000006" for trial in (whole, killed)))
    if differing is None:
        return passes("three steps, SIGKILL and three more give the bits of six")
    return fails(f"a resumed run differs from an uninterrupted one, first in {differing}", REPORT)


def first_difference(one: Path, other: Path) -> str | None:
    """Return the first tensor whose bits differ in two checkpoints, weights before optimizer states."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(one / file), load_file(other / file)
        if ours.keys() != theirs.keys():
            return f"the names in {file}"
        for name, tensor in ours.items():
            # As bytes, where NaN equals itself and -0.0 is not 0.0; flattened, because a scalar has no view as bytes.
            if not torch.equal(tensor.flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8)):
                return name
    return None


def check_waits(folder: Path, start: Start = start_trial) -> Finding:
    outcome = start(TrialTraining(str(folder), "waits", 3))
    if failure := outcome.failure():
        return fails(failure, REPORT)
    waits = outcome.seen[0]["waits"]
    text = f"waits of the host for the device in the third step: {waits}; at most {MOST_WAITS} expected"
    return (passes if waits <= MOST_WAITS else partial(warns, next_step=REPORT))(text, waits=waits)


def plan_and_probe(device_type: str) -> dict[str, Any]:
    """Return the result of `lap plan --probe` for two layers, from a process of its own."""
    changes = {"model.layers": 2, "train.device": device_type, **(REAL if device_type == "cuda" else SMALL)}
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "lapcli", "plan", "gpt561m_5L", "--probe", "5", "--json", *settings]
    if device_type != "cuda":
        # The recipe's 5 Laplacian heads are more than the 4 heads of SMALL.
        command += ["--set", "model.laplacian_heads=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def check_memory(plan: dict[str, Any]) -> Finding:
    measured, planned = plan["probe"]["memory"], plan["memory_total"]
    text = f"{measured / 1e9:.2f} GB measured for two layers, {planned / 1e9:.2f} GB planned"
    numbers = {"measured": measured, "planned": planned}
    counts_process = plan["device"] in ("CPU", "mps")  # not the memory of a GPU alone
    if measured <= MOST_MEMORY * planned + (LIBRARIES if counts_process else 0):
        return passes(text, **numbers)
    step = "leave that much more room than `lap plan` says, and report it with `lap doctor --json`"
    return (warns if counts_process else fails)(text, step, **numbers)


def check_speed(plan: dict[str, Any], device: Device) -> Finding:
    seconds = plan["probe"]["seconds_per_step"]
    rate = plan["flops_per_step"] / seconds
    peak = device.peak(plan["precision"] == "bf16")
    if peak is None:
        text = f"{rate / 1e9:,.0f} GFLOP/s in {plan['precision']}; the peak of {device.name} is not known"
        return passes(text, flops_per_second=rate)
    share, planned = rate / peak, plan["step_time"]
    numbers = {"flops_per_second": rate, "share_of_peak": share, "seconds": seconds}
    text = f"two layers take {seconds:.3g} s a step, {share:.0%} of the peak of {device.name}"
    if planned is not None:
        numbers |= {"planned_seconds": planned["seconds"], "planned_share": planned["share_of_peak"]}
        text += f"; `lap plan` expects {planned['seconds']:.3g} s, {planned['share_of_peak']:.0%}"
    if share >= LEAST_SHARE and (planned is None or seconds <= MOST_SECONDS * planned["seconds"]):
        return passes(text, **numbers)
    step = "look for other programs on the GPU and for throttling (nvidia-smi), and whether train.compile works"
    return warns(text, step, **numbers)


class _Photographs(ImageSet):
    """Sixteen JPEG files of 500 x 375 pixels in memory, decoded each time."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self._files = []
        for _ in range(16):
            pixels = generator.integers(0, 256, (94, 125, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())
        super().__init__(np.zeros(16), ["any"])

    def encoded(self, index: int) -> bytes:
        return self._files[index]

    def name(self, index: int) -> str:
        return f"photograph {index}"


def crops_per_second(recipe: SelfSupervisedRecipe, images: int = 8) -> float:
    """Measure for how many images a second one core reads and cuts the crops."""
    reader = CropReader(_Photographs(), recipe.data, 0)
    examples = [Example(0, number % 16, 0) for number in range(images)]
    reader.read(examples[:1])
    started = time.process_time()  # other programs do not count
    reader.read(examples)
    return images / (time.process_time() - started)


def images_trained(recipe: SelfSupervisedRecipe, device: Device) -> float | None:
    """Return the images a second that one GPU should train on, by `lap plan`; None if its peak is not known."""
    one = recipe.train.model_copy(update={"batch": recipe.train.micro_batch})
    time = plan_training(recipe.model_copy(update={"train": one}), 1, device).step_time
    return None if time is None else time.examples_per_second


def check_loader(
    device: Device,
    gpus: int,
    cores: int,
    rate: Callable[[SelfSupervisedRecipe], float],
    trained: Callable[[SelfSupervisedRecipe, Device], float | None] = images_trained,
) -> Finding:
    """Compare reading with training for the most demanding kind, self-supervised training with ten crops an image."""
    recipe = load_recipe(find_recipe(Path("dino_vits")))
    assert isinstance(recipe, SelfSupervisedRecipe)
    images = rate(recipe)
    one = trained(recipe, device) if gpus else None
    if one is None:
        return passes(f"{images:.0f} images a second and core; on the CPU the model is slower", images_per_core=images)
    wanted = gpus * one
    needed = -(-wanted // images)
    numbers = {"images_per_core": images, "wanted": wanted, "cores_wanted": needed, "cores": cores}
    text = f"{images:.0f} images a second and core; {gpus} GPUs need {wanted:,.0f}, so {needed:.0f} cores"
    if cores >= needed:
        return passes(f"{text} of {cores}", **numbers)
    return warns(f"{text}, and there are {cores}", "ask for more cores: the GPUs would wait for images", **numbers)


def training_checks(folder: Path, device: Device, gpus: int) -> list[Check]:
    measured: list[dict[str, Any]] = []

    def plan() -> dict[str, Any]:
        if not measured:
            measured.append(plan_and_probe(device.type))
        return measured[0]

    named: dict[str, Callable[[], Finding]] = {
        "one step twice": lambda: check_same_step(folder, False, device.type),
        "... deterministic": lambda: check_same_step(folder, True, device.type),
        "killed and resumed": lambda: check_resume(folder),
        "waits of the host": lambda: check_waits(folder),
        "speed": lambda: check_speed(plan(), device),
        "memory": lambda: check_memory(plan()),
        "reading images": lambda: check_loader(device, gpus, usable_cores(), crops_per_second),
    }
    # Apple GPUs have no deterministic algorithms.
    skipped = {"... deterministic", "killed and resumed"} if device.type == "mps" else set()
    return [Check("training", name, run) for name, run in named.items() if name not in skipped]
