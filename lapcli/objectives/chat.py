"""A stage of chat training: next-token prediction on conversations, on all tokens or only on the assistant's.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapcli.data.chat.batches import ChatBatches, PackedBatches, PaddedBatches
from lapcli.data.chat.conversation import conversation, render_prompt
from lapcli.data.chat.mixture import Mixture, prepare_mixture
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.dialogue import transcript
from lapcli.generation.engine import Engine, Sampling
from lapcli.measures.bits_per_byte import bits_per_byte
from lapcli.measures.smoothing import PROBE_SEQUENCES, smoothing, without_padding
from lapcli.objectives.language_model import build_gpt, check_samples, parameter_groups
from lapcli.objectives.objective import BatchPlan, ParameterGroup, plan_batches
from lapcli.objectives.schedules import learning_rate_multiplier
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.runtime.devices import ComputePolicy, to_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress
from lapcli.runtime.ranks import World


@dataclass(frozen=True)
class ChatData:
    tokenizer: Tokenizer
    train: Mixture
    validation: Mixture | None

    @property
    def description(self) -> str:
        held = f"; held out: {self.validation.describe()}" if self.validation else ""
        return f"{self.train.describe()}{held}"


def prepare_chat(recipe: ChatStageRecipe, tokenizer: Tokenizer, progress: Progress | None = None) -> ChatData:
    """Download and render the mixtures unless they are cached. Safe to call on every rank."""

    def mixture(data_sets: Any) -> Mixture:
        return prepare_mixture(
            data_sets,
            tokenizer,
            seed=recipe.seed,
            longest=recipe.model.context,
            needs_targets=recipe.loss == "assistant",
            skip_malformed=recipe.skip_malformed,
            progress=progress,
        )

    held_out = recipe.validation.mixture
    return ChatData(tokenizer, mixture(recipe.mixture), mixture(held_out) if held_out else None)


class StagePlan(NamedTuple):
    """The batches and prompts of a stage."""

    batches: BatchPlan
    items: ChatBatches
    held_out: ChatBatches | None
    prompts: list[list[int]]  # answered at the end


def plan_stage(recipe: ChatStageRecipe, data: ChatData, world: World) -> StagePlan:
    """Plan a stage; UsageError or DataError for everything that would fail later."""
    train, tokenizer = recipe.train, data.tokenizer
    batches = plan_batches(train.batch, train.micro_batch, world.size)
    if recipe.average == "micro_batch" and batches.micro_batch != train.micro_batch:
        raise UsageError(
            f"average: micro_batch is of {train.micro_batch} rows, but {world.size} processes share a batch of "
            f"{train.batch} as {batches.micro_batch} rows each; use another --nproc, or average: tokens"
        )

    def items(mixture: Mixture) -> ChatBatches:
        only_marked = recipe.loss == "assistant"
        if recipe.batching == "packed":
            return PackedBatches(mixture, recipe.model.context, only_marked)
        # nanochat's padding (chat_sft.py): its tokenizer has no token for it, and padding has no target.
        return PaddedBatches(mixture, tokenizer.special("<|assistant_end|>"), only_marked)

    turns = [conversation([{"role": "user", "content": prompt}]) for prompt in recipe.validation.prompts]
    prompts = [render_prompt(turn, tokenizer) for turn in turns]
    check_samples(prompts, recipe)
    return StagePlan(batches, items(data.train), items(data.validation) if data.validation else None, prompts)


class _Batch(NamedTuple):
    tokens_BT: Tensor
    targets_BT: Tensor
    weight: float  # factor of the sum over the targets


class Chat:
    best_metric = None

    def __init__(
        self, recipe: ChatStageRecipe, data: ChatData, world: World, policy: ComputePolicy | None = None
    ) -> None:
        self._recipe, self._data, self._world = recipe, data, world
        train = recipe.train
        self.batches, self._items, self._held_out, self._prompts = plan_stage(recipe, data, world)
        self._byte_lengths = torch.from_numpy(data.tokenizer.byte_lengths().astype(np.int64)).to(world.device)
        scheduled = train.steps or max(1, int((train.epochs or 0) * self._items.per_epoch) // train.batch)
        self._scheduled_steps = scheduled  # also with `drop_last_update`, as upstream: the rates are those of all steps
        self.steps = max(1, scheduled - 1) if recipe.drop_last_update else scheduled
        self.model = build_gpt(recipe, world.device, any_length=recipe.batching == "padded", policy=policy)
        packed = recipe.batching == "packed"
        self.unit = "tokens" if packed else "conversations"
        self.units_per_step = train.batch * (recipe.model.context if packed else 1)
        self.flops_per_step = float(self.model.flops_per_token()) * train.batch * self._items.tokens_per_item

    def parameter_groups(self) -> list[ParameterGroup]:
        return parameter_groups(self._recipe, self.model)

    def batch(self, step: int, micro_step: int) -> _Batch:
        size, start = self.batches.batch, step * self.batches.batch
        first = start + self.batches.first(micro_step, self._world.rank)
        rows = self._items.items(first, self.batches.micro_batch)
        tokens_BT, targets_BT = to_device(rows, self._world.device)
        if self._recipe.average == "micro_batch":
            # As nanochat: micro-batches count equally, however many targets they have. The rows are still on the
            # host, so that counting their targets waits for no GPU.
            weight = 1 / max(1, int((rows.targets_BT >= 0).sum()))
        else:
            # The loop takes the mean over micro-batches and ranks; this makes it the mean over all targets of the step.
            parts = self.batches.accumulation * self.batches.processes
            weight = parts / max(1, self._items.target_count(start, size))
        return _Batch(tokens_BT, targets_BT, weight)

    def loss(self, batch: _Batch) -> Tensor:
        return self.model.loss(batch.tokens_BT, batch.targets_BT, reduction="sum") * batch.weight

    def learning_rate_multiplier(self, step: int) -> float:
        scale = self._recipe.optimizer.lr_scale
        return scale * learning_rate_multiplier(self._recipe.schedule, step, self._scheduled_steps)

    def after_step(self, step: int) -> None:
        pass

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Measure the loss on held-out rows, weighted as in training; for packed stages also bits per byte."""
        if self._held_out is None:
            return self._smoothing() if self._recipe.validation.smoothing else {}
        settings = self._recipe.validation
        packed = self._recipe.batching == "packed"
        wanted = settings.tokens // self._recipe.model.context if packed else settings.rows
        count = max(1, min(wanted, self._held_out.per_epoch))
        nats = targets = means = groups = counted_nats = counted_bytes = 0.0
        # The recipe's micro-batch, not the plan's: the groups that are averaged do not depend on the processes.
        for share in self._world.shares(count, self._recipe.train.micro_batch):
            stop_if_asked()  # a collective, so also with an empty share
            if not share:
                continue
            tokens_BT, targets_BT = to_device(self._held_out.items(share.start, len(share)), self._world.device)
            losses_BT = self.model.loss(tokens_BT, targets_BT, reduction="none")
            counted = int((targets_BT >= 0).sum())
            nats, targets = nats + float(losses_BT.sum()), targets + counted
            means, groups = means + float(losses_BT.sum()) / max(1, counted), groups + 1
            # Clamped, because -1 (no target) would index the last token.
            bytes_BT = self._byte_lengths[targets_BT.clamp(min=0)] * (targets_BT >= 0)
            counted_nats += float(losses_BT[bytes_BT > 0].sum())
            counted_bytes += float(bytes_BT.sum())
        nats, targets, means, groups, counted_nats, counted_bytes = self._world.sum(
            [nats, targets, means, groups, counted_nats, counted_bytes]
        )
        by_group = self._recipe.average == "micro_batch"
        values = {"validation_loss": means / groups if by_group else nats / targets}
        if packed:
            text = "the text of validation.mixture that the loss counts"
            values["validation_bits_per_byte"] = bits_per_byte(counted_nats, counted_bytes, text)
        return values | self._smoothing() if settings.smoothing else values

    def _smoothing(self) -> dict[str, float]:
        """Measure smoothing on the first held-out rows, or on the first training rows if the stage holds none out."""
        items = self._held_out or self._items
        tokens_BT, targets_BT = items.items(0, min(PROBE_SEQUENCES, items.per_epoch))
        packed = self._recipe.batching == "packed"
        probe_BT = tokens_BT if packed else without_padding(tokens_BT, targets_BT)
        return smoothing(self.model, probe_BT.to(self._world.device))

    def describe_batch(self, step: int) -> str:
        return self._items.identity(step * self.batches.batch, self.batches.batch)

    def weights_metadata(self) -> dict[str, str]:
        start, init_from = self._recipe.start, self._recipe.train.init_from
        return {
            "laplacian_heads": str(self.model.config.head_plan()),
            "tokenizer_sha256": self._data.tokenizer.sha256,
            "started_from_sha256": start.weights_sha256 if start else str(init_from and init_from.sha256),
        }

    def finish(self, run_dir: Path) -> dict[str, Any]:
        """Answer the recipe's prompts."""
        settings, tokenizer = self._recipe.validation, self._data.tokenizer
        if not settings.prompts:
            return {}
        sampling = Sampling(settings.sample_tokens, settings.temperature, settings.top_k, self._recipe.seed)
        completions = Engine(self.model, tokenizer).complete(self._prompts, sampling)
        return {
            "samples": [
                {"prompt": prompt, "continuation": " " + transcript(samples[0].tokens, tokenizer)}
                for prompt, samples in zip(settings.prompts, completions, strict=True)
            ]
        }
