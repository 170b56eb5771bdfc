"""A stage of chat training: next-token prediction on conversations, on all tokens or only on the assistant's.

Shapes: B rows, T tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lapcli.data.chat.batches import ChatBatches, PackedBatches, PaddedBatches
from lapcli.data.chat.conversation import conversation, render_prompt
from lapcli.data.chat.mixture import (
    Mixture,
    count_stage,
    counts_as_text,
    data_sets_of,
    fetch_data_sets,
    prepare_mixture,
)
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.generation.dialogue import transcript
from lapcli.generation.engine import Engine, Sampling
from lapcli.measures.tokens import bits_per_byte
from lapcli.objectives.language_model import GPTObjective, learning_rate_multiplier
from lapcli.objectives.objective import PlanFacts
from lapcli.objectives.weights import Weights, inherited_tokenizer
from lapcli.recipe.chat import ChatRecipe, ChatStageRecipe
from lapcli.runs import Run
from lapcli.runtime.devices import to_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress, shown_progress
from lapcli.runtime.ranks import World


class _Batch(NamedTuple):
    tokens_BT: Tensor
    targets_BT: Tensor
    weight: float  # factor of the sum over the targets


class Chat(GPTObjective[ChatStageRecipe]):
    def __init__(self, recipe: ChatStageRecipe) -> None:
        super().__init__(recipe)
        self._packed = recipe.batching == "packed"
        self.any_length = not self._packed
        self.unit = "tokens" if self._packed else "conversations"

    def prepare(self, world: World, run: Run, initial: Weights | None) -> dict[str, Any]:
        tokenizer = inherited_tokenizer(self.recipe, run, initial)
        if tokenizer is None:
            raise UsageError(f"{run.path} was imported and cannot be trained; use `lap sft RECIPE --run {run.name}`")
        with shown_progress(world.is_main) as progress:
            self.use(tokenizer, world, progress)
        self.save_tokenizer(run)
        train, held_out = self.train_rows, self.held_out_rows
        described = f"{train.describe()}; held out: {held_out.describe()}" if held_out else train.describe()
        self.notes = [described]
        return {
            "data": described,
            "data_sha256": train.identity,
            "held_out_sha256": held_out.identity if held_out else None,
            "tokenizer_sha256": self.tokenizer.sha256,
        }

    def use(self, tokenizer: Tokenizer, world: World, progress: Progress | None = None) -> None:
        """Render the mixtures unless they are cached, and plan the batches; fail early."""
        self.tokenizer, self.world = tokenizer, world
        recipe, train = self.recipe, self.recipe.train
        self.batches = self.plan_batches(world.size)
        if recipe.average == "micro_batch" and self.batches.micro_batch != train.micro_batch:
            raise UsageError(
                f"average: micro_batch is of {train.micro_batch} rows, but {world.size} processes share a batch of "
                f"{train.batch} as {self.batches.micro_batch} rows each; use another --nproc, or average: tokens"
            )
        turns = [conversation([{"role": "user", "content": prompt}]) for prompt in recipe.validation.prompts]
        self._prompts = [render_prompt(turn, tokenizer) for turn in turns]
        self.check_samples(self._prompts)
        options: dict[str, Any] = {
            "seed": recipe.seed,
            "longest": recipe.model.context,
            "needs_targets": recipe.loss == "assistant",
            "progress": progress,
        }
        train_sets, held_out_sets = data_sets_of(recipe)
        self.train_rows = prepare_mixture(train_sets, tokenizer, **options)
        self.held_out_rows = prepare_mixture(held_out_sets, tokenizer, **options) if held_out_sets else None

        def batches_of(mixture: Mixture) -> ChatBatches:
            only_marked = recipe.loss == "assistant"
            if self._packed:
                return PackedBatches(mixture, recipe.model.context, only_marked)
            # nanochat's padding (chat_sft.py): its tokenizer has no token for it, and padding has no target.
            return PaddedBatches(mixture, tokenizer.special("<|assistant_end|>"), only_marked)

        self._items = batches_of(self.train_rows)
        self._held_out = batches_of(self.held_out_rows) if self.held_out_rows else None
        scheduled = train.steps or max(1, int((train.epochs or 0) * self._items.per_epoch) // train.batch)
        self._scheduled_steps = scheduled  # also with `drop_last_update`, as upstream: the rates are those of all steps
        self.steps = max(1, scheduled - 1) if recipe.drop_last_update else scheduled
        self.units_per_step = train.batch * (recipe.model.context if self._packed else 1)

    def batch(self, step: int, micro_step: int) -> _Batch:
        size, start = self.batches.batch, step * self.batches.batch
        first = start + self.batches.first(micro_step, self.world.rank)
        rows = self._items.items(first, self.batches.micro_batch)
        tokens_BT, targets_BT = to_device(rows, self.world.device)
        if self.recipe.average == "micro_batch":
            # As in nanochat: micro-batches have equal weight for any number of targets. The rows are still on the
            # host, so counting their targets is not a sync.
            weight = 1 / max(1, int((rows.targets_BT >= 0).sum()))
        else:
            # The loop takes the mean over micro-batches and ranks; this makes it the mean over all targets of the step.
            parts = self.batches.accumulation * self.batches.processes
            weight = parts / max(1, self._items.target_count(start, size))
        return _Batch(tokens_BT, targets_BT, weight)

    def synthetic_batch(self, examples: int, device: torch.device) -> _Batch:
        tokens_BT, targets_BT = super().synthetic_batch(examples, device)
        return _Batch(tokens_BT, targets_BT, weight=1.0)

    def loss(self, batch: _Batch) -> Tensor:
        return self.model.loss(batch.tokens_BT, batch.targets_BT, reduction="sum") * batch.weight

    def learning_rate_multiplier(self, step: int) -> float:
        scale = self.recipe.optimizer.lr_scale
        return scale * learning_rate_multiplier(self.recipe.schedule, step, self._scheduled_steps)

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Measure the loss on held-out rows, weighted as in training; for packed stages also bits per byte."""
        if self._held_out is None:
            return {}
        settings = self.recipe.validation
        wanted = settings.tokens // self.recipe.model.context if self._packed else settings.rows
        count = max(1, min(wanted, self._held_out.per_epoch))
        totals = np.zeros(6)
        # The recipe's micro-batch, not the plan's: the groups that are averaged do not depend on the processes.
        for share in self.world.shares(count, self.recipe.train.micro_batch):
            stop_if_asked()  # a collective, so also with an empty share
            if not share:
                continue
            tokens_BT, targets_BT = to_device(self._held_out.items(share.start, len(share)), self.world.device)
            losses_BT = self.model.loss(tokens_BT, targets_BT, reduction="none")
            found = self.loss_totals(losses_BT, targets_BT)
            totals += [*found, found[0] / max(1, found[1]), 1]
        nats, targets, counted_nats, counted_bytes, means, groups = self.world.sum(totals.tolist())
        by_group = self.recipe.average == "micro_batch"
        values = {"validation_loss": means / groups if by_group else nats / targets}
        if self._packed:
            text = "the held-out text that counts for the loss"
            values["validation_bits_per_byte"] = bits_per_byte(counted_nats, counted_bytes, text)
        return values

    def describe_batch(self, step: int) -> str:
        return self._items.identity(step * self.batches.batch, self.batches.batch)

    def weights_metadata(self) -> dict[str, str]:
        init_from = self.recipe.train.init_from
        return {**super().weights_metadata(), "started_from_sha256": str(init_from and init_from.sha256)}

    def finish(self) -> dict[str, Any]:
        """Answer the recipe's prompts."""
        settings = self.recipe.validation
        if not settings.prompts:
            return {}
        sampling = Sampling(settings.sample_tokens, settings.temperature, settings.top_k, self.recipe.seed)
        completions = Engine(self.model, self.tokenizer).complete(self._prompts, sampling)
        return {
            "samples": [
                {"prompt": prompt, "continuation": " " + transcript(samples[0], self.tokenizer)}
                for prompt, samples in zip(settings.prompts, completions, strict=True)
            ]
        }

    @classmethod
    def fetch(cls, recipe: ChatRecipe, progress: Progress) -> list[dict[str, Any]]:
        """Download each data set of the mixtures once."""
        return fetch_data_sets(recipe)

    def plan_facts(self) -> PlanFacts:
        counts = count_stage(self.recipe)
        facts = self.token_facts(counts["steps"])
        if not self._packed:
            facts |= {"example": "conversations"}
        return PlanFacts(data=counts_as_text(self.recipe.stage, counts), **facts)
