"""The one training loop. An objective defines the loss of a step; everything else about a run happens here.

A step: for each micro-batch forward and backward, average over the ranks, check that loss and gradient are finite, clip
the averaged gradient, update, log; then save if due or after a signal; then validate, after the save, so that a
failed validation loses nothing.

The host waits for the device once per step: the loss, the gradient norm, the objective's own numbers and whether any
rank was asked to stop arrive by one all-reduce and one copy, before the update.

`step` counts finished updates: the line of step 1 in `metrics.jsonl` is the first update, `step-000500` holds the
weights after 500 of them.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lapcli import checkpoint
from lapcli.heads.laplacian import freeze_vanishing_biases
from lapcli.objectives.objective import Objective
from lapcli.recipe.schema import BaseRecipe
from lapcli.runs import Run
from lapcli.runtime.errors import Diverged, Interrupted
from lapcli.runtime.progress import LogConsole, StepProgress
from lapcli.runtime.ranks import World
from lapcli.runtime.signals import StopRequest, stop_on_signal
from lapcli.training.metrics import MetricsLog, StepClock, without_times
from lapcli.training.optimizers import Optimizers


class Loop:
    """Trains `objective` for a run, starting from its newest intact checkpoint."""

    def __init__(
        self, objective: Objective[Any], recipe: BaseRecipe, run: Run, world: World, console: LogConsole
    ) -> None:
        self.objective, self.run, self.world, self.console = objective, run, world, console
        self.recipe, self.seed = recipe, recipe.seed
        self.clip = recipe.optimizer.clip
        self.checkpoint_every, self.keep = recipe.checkpoint.every, recipe.checkpoint.keep
        self.validate_every = recipe.validation.every
        freeze_vanishing_biases(objective.model)
        self.module = self._sharded(recipe)  # before the optimizers, whose state is sharded too
        self.optimizers = Optimizers(objective.parameter_groups())
        self.saver = checkpoint.Saver(world)
        self.metrics = MetricsLog(run.metrics)
        self.step = 0
        self.stopping = False  # whether any rank was asked to stop; the same on all of them
        self.validated: dict[int, dict[str, float]] = {}
        self.saved: checkpoint.Checkpoint | None = None
        self.saved_step: int | None = None  # on every rank, so that all of them take the same decision to save
        self._next: tuple[int, Any] | None = None  # a step and its first batch, which was asked for early

    def train(self) -> None:
        """Train until all steps are done, saved and validated; raise Interrupted after a signal."""
        self._resume()
        self.clock = StepClock(self.world.device)  # after the resume, whose time belongs to no step
        steps, unit, units = self.objective.steps, self.objective.unit, self.objective.units_per_step

        def announce(signal: str) -> None:
            if self.world.is_main:
                self.console.print(f"{signal}: finishing the step and saving; Ctrl-C or SIGTERM again stops at once")

        with (
            contextlib.closing(self.saver),
            stop_on_signal(announce) as stop,
            StepProgress(self.console, self.step, steps, unit, self.world.is_main) as progress,
        ):
            self._validate_if_due(stop, progress)
            while self.step < steps:
                line = self._update(self.step, stop)
                self.step += 1
                # Ranks have exchanged stop requests before the update; a later one is handled in the next step.
                stopping = self.stopping or (self.world.size == 1 and bool(stop))
                line |= self.clock.end_step(units, unit)
                if self.world.is_main:  # before the save: a resume keeps the lines up to its step
                    self.metrics.append(line)
                    throughput = line.get(f"{unit}_per_second")
                    progress.step(self.step, line["loss"], line["lr"], throughput)
                is_last = stopping or self.step == steps
                if is_last or _is_due(self.step, self.checkpoint_every):
                    self._save(is_last=is_last)
                if stopping and self.step < steps:  # else only the validation is left, which checks for signals itself
                    raise self._interrupted(stop)
                self._validate_if_due(stop, progress)

    def _update(self, step: int, stop: StopRequest | None = None) -> dict[str, Any]:
        """Do one optimizer step and return its line of metrics; `stopping` is set if any rank was asked to stop."""
        accumulation = self.objective.batches.accumulation
        multiplier = self.objective.learning_rate_multiplier(step)
        self.optimizers.set_rates(multiplier, step)

        # On the device: a Python number would be a sync in every micro-step.
        total = torch.zeros((), device=self.world.device)
        for micro_step in range(accumulation):
            if self._next is not None and (step, micro_step) == (self._next[0], 0):
                batch, self._next = self._next[1], None
            else:
                batch = self.objective.batch(step, micro_step)
            _seed_model(self.seed, step, micro_step, self.world.rank)
            if isinstance(self.module, FSDPModule):  # the ranks average gradients once per step
                is_last = micro_step == accumulation - 1
                self.module.set_requires_gradient_sync(is_last)
                # Weights that stay gathered until the backward also stay gathered for the other micro-steps.
                self.module.set_reshard_after_backward(is_last or self.recipe.train.shard == "weights")
            loss = self.module(self.objective.loss, batch)
            (loss / accumulation).backward()
            total += loss.detach()
        norms = self.optimizers.gradient_norms()  # of the averaged gradient
        further = self.objective.update_metrics()
        if step + 1 < self.objective.steps:  # before the sync, so that the host prepares it while the device computes
            self._next = step + 1, self.objective.batch(step + 1, 0)
        # The only sync of the step. The norms are the same on all ranks, so their means are the norms.
        means, self.stopping = self.world.means([total, *norms, *further.values()], bool(stop) or self.saver.has_failed)
        mean_loss, known_norms = means[0] / accumulation, means[1 : 1 + len(norms)]
        gradient_norm = known_norms[0] if len(norms) == 1 else math.hypot(*known_norms)
        for what, value in (("loss", mean_loss), ("norm of the gradient", gradient_norm)):
            if not math.isfinite(value):
                last = self.saved.path if self.saved else "none, the run had not saved yet"
                raise Diverged(
                    f"the {what} is {value} at step {step + 1}, in {self.objective.describe_batch(step)}; nothing was "
                    f"updated. Last good checkpoint: {last}. "
                    "Lower the learning rate or look at that batch."
                )
        self.optimizers.clip(self.clip, norms, known_norms)
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.objective.after_step(step)
        return {
            "step": step + 1,
            "loss": mean_loss,
            "lr": self.optimizers.groups[0].lr * multiplier,
            "gradient_norm": gradient_norm,
            **dict(zip(further, means[1 + len(norms) :], strict=True)),
        }

    def _validate_if_due(self, stop: StopRequest, progress: StepProgress) -> None:
        """Validate at the start, at the end and every `validation.every` steps; a resumed run makes up a missed one."""
        due = self.step in (0, self.objective.steps) or _is_due(self.step, self.validate_every)
        if not due or self.step in self.validated:
            return

        def stop_if_asked() -> None:
            # A collective: a signal to one rank stops all of them at the same batch of the validation.
            if self.world.any(bool(stop)):
                if self.saved_step != self.step:
                    self._save()
                self._finish_save()
                raise self._interrupted(stop)

        if self.objective.best_metric and self.step and self.saved_step != self.step:
            self._save(is_last=False)  # the best weights can only be kept if they are saved
        with self.clock.between_steps("validating"), self.gathered_weights():
            values = self.module(self.objective.validate, stop_if_asked)
        self.validated[self.step] = values
        times = self.clock.since_last_line()
        if self.world.is_main:
            self.metrics.append({"step": self.step, **values, **times})
            shown = "  ".join(f"{name.removeprefix('validation_')} {value:.4f}" for name, value in values.items())
            progress.note(f"step {self.step}/{self.objective.steps}  validation: {shown}")
            if not self.saver.is_saving:  # the best step may have changed; a save prunes by itself
                checkpoint.prune(self.run.checkpoints, self.step, self.keep, self.best_step())

    def best_step(self) -> int | None:
        """Return the validated step with the largest `best_metric`, the first of equals; step 0 has no checkpoint."""
        metric = self.objective.best_metric
        values = {step: numbers[metric] for step, numbers in self.validated.items() if metric and step > 0}
        return max(sorted(values), key=lambda step: values[step]) if values else None

    def _save(self, *, is_last: bool = True) -> None:
        """Save each rank's part, in the background if the recipe requests it and more steps follow."""
        with self.clock.between_steps("saving"):
            self._finish_save()
            with self.world.together():
                if self.world.is_main:
                    self.metrics.flush()
            snapshot: dict[str, Any] = {
                "folder": self.run.checkpoints,
                "step": self.step,
                "model": self.objective.model.state_dict(),
                "optimizer": self.optimizers.state(),
                "metadata": self.objective.weights_metadata(),
                "state": {"world_size": self.world.size, "threads": torch.get_num_threads(), "seed": self.seed},
                "keep": self.keep,
                "best": self.best_step(),
            }
            if self.recipe.checkpoint.asynchronous and not is_last:
                self.saver.start(**snapshot)
            else:
                self._note(self.saver.save(**snapshot))
        self.saved_step = self.step

    def _finish_save(self) -> None:
        """Wait for the background save, if there is one. A collective."""
        with self.world.together():
            saved = self.saver.wait()
        if saved is not None:
            self._note(saved)

    def _note(self, saved: checkpoint.Checkpoint) -> None:
        """Name a checkpoint in `run.json` once it is complete, so that it never names weights that do not exist."""
        self.saved = saved
        with self.world.together():
            if self.world.is_main:
                self.run.update(step=saved.step, weights_sha256=saved.weights_sha256)

    def _resume(self) -> None:
        """Load the newest intact checkpoint, which rank 0 chooses for all ranks, and drop later metrics."""
        with self.world.together():
            self.saved = checkpoint.newest(self.run.checkpoints, self._warn) if self.world.is_main else None
        # Between two blocks of `together`: inside one, a rank that fails would skip this collective.
        chosen = self.world.from_main(self.saved and (self.saved.step, self.saved.sha256))
        with self.world.together():
            if isinstance(chosen, tuple):
                self.saved = self.saved or checkpoint.chosen_by_rank_0(self.run.checkpoints, *chosen)
                plan = self.objective.weights_metadata()["laplacian_heads"]
                self.saved.load(self.objective.model, self.optimizers, plan)
                self.step = self.saved_step = self.saved.step
                for key, current in (("world_size", self.world.size), ("threads", torch.get_num_threads())):
                    before = self.saved.state.get(key, current)
                    if before != current:
                        text = f"{key} was {before} and is now {current}"
                        self._warn(f"{text}: the batches are the same, but the rounding is not")
                if self.world.is_main:
                    self.console.print(f"resuming from {self.saved.path} of {self.objective.steps} steps")
        if chosen is None and self.run.info.get("step", 0):
            self._warn(f"{self.run.checkpoints} no longer has an intact checkpoint: the run restarts from step 0")
        lines: object = None
        with self.world.together():
            if self.world.is_main:
                lines = self.metrics.resume(self.step, self._warn)
                # A process killed after its last save may not have recorded it.
                loaded = {"step": self.step, "weights_sha256": self.saved.weights_sha256} if self.saved else {}
                self.run.update(**loaded)
        for line in self.world.from_main(lines):  # type: ignore[attr-defined]
            if "loss" not in line:  # a validation: its loss is `validation_loss`
                values = without_times(line)
                self.validated[values.pop("step")] = values

    def _sharded(self, recipe: BaseRecipe) -> "_Entry":
        """Return the module that gives access to sharded weights: FSDP2 gathers a block while it computes.

        `train.shard: gradients` keeps gathered weights until the backward has used them; `weights` gathers them again.
        """
        if recipe.train.recompute == "blocks":
            self.objective.recompute_blocks()
        entry = _Entry(self.objective.model)
        if self.world.size > 1:
            mesh = init_device_mesh(self.world.device.type, (self.world.size,))
            bf16 = self.objective.policy.bf16  # gradients are reduced in float32 all the same
            policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if bf16 else None, cast_forward_inputs=False)
            for part in self.objective.shards():
                dtype = self.objective.gathered_dtype(part)
                again = recipe.train.shard == "weights"
                one = dataclasses.replace(policy, param_dtype=dtype)
                fully_shard(part, mesh=mesh, reshard_after_forward=again, mp_policy=one)
            fully_shard(entry, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        return entry

    @contextlib.contextmanager
    def gathered_weights(self) -> Iterator[None]:
        """Gather all weights on every rank, for work that ranks do alone or in unequal amounts: a rank whose part of a
        validation is empty would miss a gather that the others wait in. A collective."""
        parts = [part for part in self.module.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        yield
        for part in parts:
            part.reshard()
            again = self.recipe.train.shard == "weights" and part is not self.module
            part.set_reshard_after_forward(again, recurse=False)

    def _interrupted(self, stop: StopRequest) -> Interrupted:
        return Interrupted(
            f"stopped by {stop.name or 'a signal to another rank'} at step {self.step} of {self.objective.steps}; "
            "saved. Run the same command to resume."
        )

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            self.console.warn(text)


class _Entry(nn.Module):
    """The only access to sharded weights; those outside of `shards()` are gathered while `forward` runs a function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def _seed_model(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed the model's random draws (drop path) by these four values, so that a resume needs no generator state."""
    key = 0
    for part in (seed, step, micro_step, rank):
        key = (key * 0x9E3779B97F4A7C15 + part + 1) % 2**63  # 2^64 / the golden ratio: spreads nearby numbers
    torch.manual_seed(key)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
