"""The one training loop. An objective defines the loss of a step; everything else about a run happens here.

A step: for each micro-batch forward and backward, average over the ranks, check that loss and gradient are finite, clip
the averaged gradient, update, log; then save if it is due or if a signal came; then validate, after the save, so that a
failed validation loses nothing.

The host waits for the device once per step: the loss, the gradient norm, the objective's own numbers and whether any
rank was asked to stop come in one sum over the ranks and one copy, before the update.

`step` counts finished updates: the line of step 1 in `metrics.jsonl` is the first update, `step-000500` holds the
weights after 500 of them.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lapcli import checkpoint
from lapcli.heads.operator_attention import freeze_vanishing_biases
from lapcli.objectives.objective import Objective
from lapcli.recipe.schema import BaseRecipe
from lapcli.runs import Run
from lapcli.runtime.devices import peak_flops
from lapcli.runtime.errors import Diverged, Interrupted, LapError, from_os_error
from lapcli.runtime.progress import LogConsole, StepProgress
from lapcli.runtime.ranks import World
from lapcli.runtime.signals import StopRequest, stop_on_signal
from lapcli.training.metrics import MetricsLog, StepClock, without_times
from lapcli.training.optimizers import Optimizers

_BUCKETS = 8
_SMALLEST_BUCKET = 25  # megabytes: DDP's default; smaller buckets are slow to send


class Loop:
    """Trains `objective` for a run, from its newest intact checkpoint."""

    def __init__(
        self, objective: Objective[Any], recipe: BaseRecipe, run: Run, world: World, console: LogConsole
    ) -> None:
        self.objective, self.run, self.world, self.console = objective, run, world, console
        self.seed = recipe.seed
        self.clip = recipe.optimizer.clip
        self.checkpoint_every, self.keep = recipe.checkpoint.every, recipe.checkpoint.keep
        self.validate_every = recipe.validation.every
        freeze_vanishing_biases(objective.model)
        self.optimizers = Optimizers(objective.parameter_groups())
        self.metrics = MetricsLog(run.metrics)
        self.step = 0
        self.stopping = False  # whether any rank was asked to stop; the same on all of them
        self.validated: dict[int, dict[str, float]] = {}
        self.saved: checkpoint.Checkpoint | None = None  # on rank 0, which writes
        self.saved_step: int | None = None  # on every rank, so that all of them take the same decision to save
        self.module = self._parallel()
        self.peak = _peak_of(world)

    def train(self) -> None:
        """Train until all steps are done, saved and validated; raise Interrupted if a signal came first."""
        self._resume()
        self.clock = StepClock(self.world.device)  # after the resume, whose time belongs to no step
        steps = self.objective.steps
        with (
            stop_on_signal(self._stopping) as stop,
            StepProgress(self.console, self.step, steps, self.objective.unit, self.world.is_main) as progress,
        ):
            self._validate_if_due(stop, progress)
            while self.step < steps:
                line = self._update(self.step, stop)
                self.step += 1
                # Ranks have exchanged stop requests before the update; a later one is handled in the next step.
                stopping = self.stopping or (self.world.size == 1 and bool(stop))
                line |= self.clock.end_step(self.objective.units_per_step, self.objective.unit)
                if self.world.is_main:  # before the save: a resume keeps the lines up to its step
                    self.metrics.append(line)
                    throughput = line.get(f"{self.objective.unit}_per_second")
                    progress.step(self.step, line["loss"], line["lr"], throughput, self._share_of_peak(throughput))
                if stopping or self.step == steps or _is_due(self.step, self.checkpoint_every):
                    self._save()
                if stopping and self.step < steps:  # else only the validation is left, which checks for signals itself
                    raise self._interrupted(stop)
                self._validate_if_due(stop, progress)

    def _update(self, step: int, stop: StopRequest | None = None) -> dict[str, Any]:
        """Do one optimizer step and return its line of the metrics; `stopping` is set if any rank was asked to stop."""
        accumulation = self.objective.batches.accumulation
        multiplier = self.objective.learning_rate_multiplier(step)
        self.optimizers.set_learning_rates(multiplier)
        self.optimizers.set_options(step)

        # On the device: a Python number would make the host wait at every micro-step.
        total = torch.zeros((), device=self.world.device)
        for micro_step in range(accumulation):
            batch = self.objective.batch(step, micro_step)
            _seed_model(self.seed, step, micro_step, self.world.rank)
            # DDP decides in the forward whether the backward will average, so the context has to contain both.
            with self._without_averaging() if micro_step < accumulation - 1 else contextlib.nullcontext():
                loss = self.module(batch)
                (loss / accumulation).backward()
            total += loss.detach()
        norms = self.optimizers.gradient_norms()  # of the averaged gradient
        further = self.objective.update_metrics()
        # The one wait of the step. The norms are the same on all ranks, so their means are the norms.
        means, self.stopping = self.world.means([total, *norms, *further.values()], bool(stop))
        mean_loss, known_norms = means[0] / accumulation, means[1 : 1 + len(norms)]
        gradient_norm = known_norms[0] if len(norms) == 1 else math.hypot(*known_norms)
        for what, value in (("loss", mean_loss), ("norm of the gradient", gradient_norm)):
            if not math.isfinite(value):
                raise self._diverged(step, what, value)
        self.optimizers.clip(self.clip, norms, known_norms)
        self.optimizers.step()
        self._zero_gradients()
        self.objective.after_step(step)
        values = dict(zip(further, means[1 + len(norms) :], strict=True))
        if warning := self.objective.warning(step, values):
            self._warn(f"step {step + 1}: {warning}")
        return {
            "step": step + 1,
            "loss": mean_loss,
            "lr": self.optimizers.groups[0].lr * multiplier,
            "gradient_norm": gradient_norm,
            **values,
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
                raise self._interrupted(stop)

        if self.objective.best_metric and self.step and self.saved_step != self.step:
            self._save()  # the best weights can only be kept if they are saved
        with self.clock.between_steps("validating"):
            values = self.objective.validate(stop_if_asked)
        self.validated[self.step] = values
        times = self.clock.since_last_line()
        if self.world.is_main:
            self.metrics.append({"step": self.step, **values, **times})
            short = {  # without what is a number for each layer or head
                k.removeprefix("validation_"): v for k, v in values.items() if "_layer_" not in k
            }
            shown = "  ".join(f"{name} {value:.4f}" for name, value in short.items())
            progress.note(f"step {self.step}/{self.objective.steps}  validation: {shown}")
            # The best step may have changed.
            checkpoint.prune(self.run.checkpoints, self.step, self.keep, self.best_step())

    def best_step(self) -> int | None:
        """Return the validated step with the largest `best_metric`, the first of equals; step 0 has no checkpoint."""
        metric = self.objective.best_metric
        values = {step: numbers[metric] for step, numbers in self.validated.items() if metric and step > 0}
        return max(sorted(values), key=lambda step: values[step]) if values else None

    def _save(self) -> None:
        """Save on rank 0; the others wait, so that none of them runs ahead of a save that fails."""
        if self.world.size > 1:
            self._refuse_other_weights()
        with self.clock.between_steps("saving"), self.world.together():
            if self.world.is_main:
                self._write()
        self.saved_step = self.step

    def _refuse_other_weights(self) -> None:
        """Refuse to save weights that the ranks do not share, as with gradients that were not averaged."""
        checksums = self.world.from_all(weights_checksum(self.objective.model))
        others = [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]
        if others:
            raise LapError(
                f"rank {others[0]} has other weights than rank 0 after step {self.step}, so nothing was saved; check "
                "the machine with `lap doctor --only processes`, or train with --nproc 1"
            )

    def _write(self) -> None:
        try:
            self.metrics.flush()
            self.saved = checkpoint.save(
                self.run.checkpoints,
                self.step,
                self.objective.model.state_dict(),
                self.optimizers.state(),
                self.objective.weights_metadata(),
                {"world_size": self.world.size, "threads": torch.get_num_threads(), "seed": self.seed},
                self.keep,
                self.best_step(),
            )
            # After the checkpoint, so that `run.json` never names weights that do not exist.
            self.run.update(step=self.step, weights_sha256=self.saved.weights_sha256)
        except OSError as error:
            raise from_os_error(error) from error

    def _resume(self) -> None:
        """Load the newest intact checkpoint, which rank 0 chooses for all ranks, and drop the metrics beyond it."""
        with self.world.together():
            self.saved = checkpoint.newest(self.run.checkpoints, self._warn) if self.world.is_main else None
        # Between two blocks of `together`: inside one, a rank that fails would skip this collective.
        chosen = self.world.from_main(self.saved and (self.saved.step, self.saved.sha256))
        with self.world.together():
            if isinstance(chosen, tuple):
                self.saved = self.saved or checkpoint.chosen_by_rank_0(self.run.checkpoints, *chosen)
                self._load(self.saved)
        if chosen is None and self.run.info.get("step", 0):
            self._warn(f"{self.run.checkpoints} has no intact checkpoint any more: the run starts again from step 0")
        lines: object = None
        with self.world.together():
            if self.world.is_main:
                lines = self.metrics.resume(self.step, self._warn)
                # A process that was killed after its last save may not have noted it.
                loaded = {"step": self.step, "weights_sha256": self.saved.weights_sha256} if self.saved else {}
                self.run.update(**loaded, **({"metrics_lost": True} if self.step and not lines else {}))
        for line in self.world.from_main(lines):  # type: ignore[attr-defined]
            if "loss" not in line:  # a validation: its loss is `validation_loss`
                values = without_times(line)
                self.validated[values.pop("step")] = values

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        plan = self.objective.weights_metadata()["laplacian_heads"]
        converted = saved.load(self.objective.model, self.optimizers, plan)
        self.step = self.saved_step = saved.step
        consequence = "the same batches, but not the same rounding"
        if converted:
            more = f" and {len(converted) - 1} more tensors" if len(converted) > 1 else ""
            self._warn(f"{converted[0]}{more} converted to another precision: {consequence}")
        for key, current in (("world_size", self.world.size), ("threads", torch.get_num_threads())):
            before = saved.state.get(key, current)
            if before != current:
                self._warn(f"{key} was {before} and is {current}: {consequence}")
        if self.world.is_main:
            self.console.print(f"resuming from {saved.path} of {self.objective.steps} steps")

    def _parallel(self) -> nn.Module:
        module = _LossModule(self.objective, is_alone=self.world.size == 1)
        if self.world.size == 1:
            return module
        devices = [self.world.device.index] if self.world.device.type == "cuda" else None
        parallel = DistributedDataParallel(
            module,
            device_ids=devices,
            forward_sync_buffers=False,  # the buffers are rotary tables, which never change
            gradient_as_bucket_view=True,  # saves a second copy of all gradients, see `_zero_gradients`
            bucket_cap_mb=bucket_megabytes(module),
        )
        # DDP rebuilds its buckets after its first backward, and with three or more processes their layout determines
        # the order in which gradients are summed. A backward of zeros moves that before the first step, so that a
        # resumed run sums in the same order as an uninterrupted one.
        parallel(None).backward()
        self._zero_gradients()
        return parallel

    def _zero_gradients(self) -> None:
        # DDP's buckets stay allocated: without them, micro-batches would accumulate in a second copy of all gradients.
        self.optimizers.zero_grad(set_to_none=self.world.size == 1)

    def _without_averaging(self) -> contextlib.AbstractContextManager[None]:
        """Return a context without averaging: the ranks average gradients once per step, with the last micro-batch."""
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _share_of_peak(self, throughput: float | None) -> float | None:
        if self.peak is None or throughput is None:
            return None
        return throughput * self.objective.flops_per_step / self.objective.units_per_step / self.peak

    def _interrupted(self, stop: StopRequest) -> Interrupted:
        return Interrupted(
            f"stopped by {stop.name or 'a signal to another rank'} at step {self.step} of {self.objective.steps}; "
            "saved. Run the same command to resume."
        )

    def _diverged(self, step: int, what: str, value: float) -> Diverged:
        last = self.saved.path if self.saved else "none, the run had not saved yet"
        return Diverged(
            f"the {what} is {value} at step {step + 1}, in {self.objective.describe_batch(step)}; nothing was updated. "
            f"Last good checkpoint: {last}. Lower the learning rate or look at that batch."
        )

    def _stopping(self, name: str) -> None:
        if self.world.is_main:
            self.console.print(f"{name}: finishing the step and saving; Ctrl-C or SIGTERM again stops at once")

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            self.console.warn(text)


class _LossModule(nn.Module):
    """The module that DDP wraps: it averages the gradients of computations in `forward`."""

    def __init__(self, objective: Objective[Any], is_alone: bool) -> None:
        super().__init__()
        self.model = objective.model
        self._loss: Callable[[Any], Tensor] = objective.loss
        self._unused: list[nn.Parameter] | None = [] if is_alone else None

    def forward(self, batch: Any) -> Tensor:
        """Return the loss of a batch; for None, a zero that depends on all parameters."""
        if batch is None:
            return _zero([p for p in self.parameters() if p.requires_grad])
        loss = self._loss(batch)
        if self._unused is None:
            self._unused = unused_parameters(self, loss)
        # DDP waits for every gradient before it averages any of them, and a head operator may ignore its queries.
        return loss + _zero(self._unused) if self._unused else loss


def _zero(parameters: Sequence[Tensor]) -> Tensor:
    """Return a zero that depends on the parameters."""
    # float: a stack has one dtype, and a GPT's embedding may be bf16
    return torch.stack([0.0 * p.sum().float() for p in parameters]).sum()


def unused_parameters(module: nn.Module, loss: Tensor) -> list[nn.Parameter]:
    """Return the parameters that the loss does not depend on, by its graph."""
    seen, used, pending = set(), set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            used.add(id(getattr(node, "variable", None)))  # of a leaf
            pending += [following for following, _ in node.next_functions]
    return [p for p in module.parameters() if p.requires_grad and id(p) not in used]


@torch.no_grad()
def weights_checksum(model: nn.Module) -> list[int]:
    """Return the sum of each parameter's bits."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    weights = [p.contiguous().view(integers[p.element_size()]) for p in model.parameters()]
    sums: list[int] = torch.stack([bits.sum(dtype=torch.int64) for bits in weights]).tolist()
    return sums


def _seed_model(seed: int, step: int, micro_step: int, rank: int) -> None:
    """Seed what the model draws (drop path) by these four, so that a resume needs no generator state."""
    key = 0
    for part in (seed, step, micro_step, rank):
        key = (key * 0x9E3779B97F4A7C15 + part + 1) % 2**63  # 2^64 / the golden ratio: spreads nearby numbers
    torch.manual_seed(key)


def bucket_megabytes(module: nn.Module) -> int:
    """Return the size of DDP's buckets: an eighth of all gradients, so that sending overlaps with the backward.

    torch.compile splits a model into a graph for each bucket. With DDP's default of 25 MB a layer of a large model
    would be several graphs, and everything that passes between graphs stays in memory.
    """
    size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return max(_SMALLEST_BUCKET, -(-size // (_BUCKETS * 2**20)))


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _peak_of(world: World) -> float | None:
    if world.device.type != "cuda":
        return None
    peak = peak_flops(torch.cuda.get_device_name(world.device))
    return None if peak is None else peak * world.size
