"""Next-token prediction with a GPT: Muon for the block matrices, AdamW for embedding and head, bits per byte.

Shapes: B sequences, T tokens.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapcli.data.text.batches import TokenBatches
from lapcli.data.text.tokens import TextData
from lapcli.generation.engine import generate
from lapcli.heads.operator_attention import operator_parameters
from lapcli.measures.bits_per_byte import bigram_bits_per_byte, bits_per_byte
from lapcli.measures.smoothing import PROBE_SEQUENCES, smoothing
from lapcli.models.gpt import GPT, GPTConfig
from lapcli.objectives.objective import ParameterGroup, decay_groups, plan_batches
from lapcli.objectives.schedules import learning_rate_multiplier, muon_momentum
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.optimizers import MuonSection
from lapcli.recipe.schema import GPTRecipe, LanguageModelRecipe
from lapcli.runtime.devices import ComputePolicy, compute_policy, this_cpu, to_device
from lapcli.runtime.errors import UsageError
from lapcli.runtime.machine import check_compiler
from lapcli.runtime.ranks import World


def gpt_config(recipe: GPTRecipe) -> GPTConfig:
    return GPTConfig(**recipe.model.model_dump(), vocab=recipe.tokenizer.vocab)


def parameter_groups(recipe: GPTRecipe, model: GPT) -> list[ParameterGroup]:
    """Group the parameters as nanochat does; the AdamW rates shrink with the width, Muon's does not.

    Any other optimizer updates all parameters at one rate.
    """
    named, settings = dict(model.named_parameters()), recipe.optimizer
    if not isinstance(settings, MuonSection):  # recipe/loading.py put the section of another optimizer in its place
        return decay_groups(settings, named, operator_parameters(model))
    width_factor = (recipe.model.width / settings.reference_width) ** -0.5
    adamw = {"betas": tuple(settings.betas), "eps": settings.eps, "weight_decay": settings.weight_decay}
    precision = settings.newton_schulz_precision
    bf16 = precision == "bf16" or (precision == "auto" and model.policy is not None and model.policy.bf16)
    muon = {"steps": settings.newton_schulz_steps, "dtype": torch.bfloat16 if bf16 else torch.float32}
    embedding, head = ({name: named.pop(name)} for name in ("embed.weight", "head.weight"))
    # Sorted, because the order of a set of names varies between processes, and sums over gradients with it.
    learnt = {name: named.pop(name) for name in sorted(operator_parameters(model))}
    undecayed, rate = {**adamw, "weight_decay": 0.0}, settings.operator_lr * width_factor
    operators = [ParameterGroup("operators", "adamw", rate, learnt, undecayed)] if learnt else []
    return [
        ParameterGroup(
            "matrices",
            "muon",
            settings.lr,
            named,
            {**muon, "momentum": settings.momentum},
            at_step=lambda step: {"momentum": muon_momentum(settings, step)},
        ),
        ParameterGroup("embedding", "adamw", settings.embedding_lr * width_factor, embedding, adamw),
        ParameterGroup("head", "adamw", settings.head_lr * width_factor, head, adamw),
        *operators,
    ]


def build_gpt(
    recipe: GPTRecipe,
    device: torch.device,
    *,
    is_drawn: bool = True,
    any_length: bool = False,
    policy: ComputePolicy | None = None,
) -> GPT:
    """Build the model of a recipe. Without `is_drawn` its weights are uninitialized, to be loaded over.

    `any_length`: the length of sequences differs between batches.
    """
    train = recipe.train
    # A graph for any length gains less than one for a fixed length, so `auto` does not compile it.
    compiles = False if any_length and train.compile == "auto" else train.compile
    policy = policy or compute_policy(device, train.precision, compiles)
    with device if device.type == "meta" else contextlib.nullcontext():
        model = GPT(gpt_config(recipe), is_drawn=False)
    if is_drawn and device.type != "meta":  # on the CPU, so that a seed gives the same weights on every device
        model.initialise(torch.Generator().manual_seed(recipe.seed))
    model.policy = policy
    if policy.bf16:
        model.use_bf16()
    model.to(device)
    if policy.compiles:
        check_compiler(device.type)
        model.use_compile(any_length=any_length)
    return model


def check_samples(prompts: Sequence[Sequence[int]], recipe: LanguageModelRecipe | ChatStageRecipe) -> None:
    """Refuse samples that do not fit the model before training, since they are generated after it."""
    wanted, positions = recipe.validation.sample_tokens, gpt_config(recipe).positions
    longest = max(map(len, prompts), default=0)
    if prompts and longest + wanted > positions:
        raise UsageError(
            f"validation.sample_tokens: {wanted:,} tokens after a prompt of {longest:,} go beyond the model's "
            f"{positions:,} positions, which are 10 times model.context; lower it or shorten validation.prompts"
        )


class LanguageModel:
    unit = "tokens"
    best_metric = None

    def __init__(
        self, recipe: LanguageModelRecipe, data: TextData, world: World, policy: ComputePolicy | None = None
    ) -> None:
        self._recipe, self._data, self._world = recipe, data, world
        train, context = recipe.train, recipe.model.context
        self.batches = plan_batches(train.batch, train.micro_batch, world.size)
        self._sequences = TokenBatches(
            data.train, context=context, batch=train.batch, seed=recipe.seed, shuffled=recipe.data.shuffled
        )
        # The validation text in stream order: `shuffled` means that no order is drawn.
        self._validation = TokenBatches(data.validation, context=context, batch=1, seed=0, shuffled=True)
        self._validation_sequences = max(
            1, min(recipe.validation.tokens // context, self._validation.sequences_per_epoch)
        )
        self._prompts = [[data.tokenizer.bos, *data.tokenizer.encode(prompt)] for prompt in recipe.validation.prompts]
        check_samples(self._prompts, recipe)
        if recipe.validation.bigram:
            _check_memory_for_bigrams(len(data.train))
        self._byte_lengths = torch.from_numpy(data.tokenizer.byte_lengths().astype(np.int64)).to(world.device)
        self.steps = train.steps or max(
            1, int((train.epochs or 0) * self._sequences.sequences_per_epoch) // train.batch
        )
        self.model = build_gpt(recipe, world.device, policy=policy)
        self.units_per_step = train.batch * context
        self.flops_per_step = float(self.model.flops_per_token()) * self.units_per_step

    def parameter_groups(self) -> list[ParameterGroup]:
        return parameter_groups(self._recipe, self.model)

    def batch(self, step: int, micro_step: int) -> list[Tensor]:
        """Return tokens and targets."""
        first = self.batches.first(micro_step, self._world.rank)
        return to_device(self._sequences.sequences(step, first, self.batches.micro_batch), self._world.device)

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens_BT, targets_BT = batch
        return self.model.loss(tokens_BT, targets_BT)

    def learning_rate_multiplier(self, step: int) -> float:
        return learning_rate_multiplier(self._recipe.schedule, step, self.steps)

    def after_step(self, step: int) -> None:
        pass

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Measure the loss and bits per byte: nats / ln 2 / the raw bytes of the targets (special tokens have none)."""
        nats = targets = counted_nats = counted_bytes = 0.0
        for share in self._world.shares(self._validation_sequences, self.batches.micro_batch):
            stop_if_asked()  # a collective, so also with an empty share
            if not share:
                continue
            sequences = self._validation.sequences(0, share.start, len(share))
            tokens_BT, targets_BT = to_device(sequences, self._world.device)
            losses_BT = self.model.loss(tokens_BT, targets_BT, reduction="none")
            bytes_BT = self._byte_lengths[targets_BT]
            nats += float(losses_BT.sum())
            targets += losses_BT.numel()
            counted_nats += float(losses_BT[bytes_BT > 0].sum())
            counted_bytes += float(bytes_BT.sum())
        nats, targets, counted_nats, counted_bytes = self._world.sum([nats, targets, counted_nats, counted_bytes])
        values = {
            "validation_loss": nats / targets,
            "validation_bits_per_byte": bits_per_byte(counted_nats, counted_bytes, "the held-out text"),
        }
        return values | self._smoothing() if self._recipe.validation.smoothing else values

    def _smoothing(self) -> dict[str, float]:
        tokens_BT, _ = self._validation.sequences(0, 0, min(PROBE_SEQUENCES, self._validation.sequences_per_epoch))
        return smoothing(self.model, tokens_BT.to(self._world.device))

    def describe_batch(self, step: int) -> str:
        return self._sequences.identity(step)

    def weights_metadata(self) -> dict[str, str]:
        return {"laplacian_heads": str(self.model.config.head_plan()), "tokenizer_sha256": self._data.tokenizer.sha256}

    def finish(self, run_dir: Path) -> dict[str, Any]:
        """Continue the recipe's prompts, and evaluate a bigram model if the recipe asks for it."""
        results: dict[str, Any] = {}
        settings = self._recipe.validation
        if settings.prompts:
            tokenizer = self._data.tokenizer
            results["samples"] = [
                {"prompt": prompt, "continuation": tokenizer.decode(self._continue(ids))}
                for prompt, ids in zip(settings.prompts, self._prompts, strict=True)
            ]
        if settings.bigram:
            train, validation = self._data.train, self._data.validation
            tokens = self._validation_sequences * self._recipe.model.context + 1  # with the target of the last token
            results["bigram_bits_per_byte"] = bigram_bits_per_byte(
                train.read(0, len(train)), validation.read(0, tokens), self._data.tokenizer.byte_lengths()
            )
        return results

    def _continue(self, prompt: list[int]) -> list[int]:
        settings = self._recipe.validation
        return generate(
            self.model,
            prompt,
            settings.sample_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=self._recipe.seed,
        )


def _check_memory_for_bigrams(tokens: int) -> None:
    """Refuse a bigram model that does not fit into memory before the run, at whose end it is evaluated."""
    needed, available = 32 * tokens, this_cpu().memory  # counting pairs takes four arrays of 8 bytes per token
    if available is not None and needed > available:
        raise UsageError(
            f"validation.bigram counts the pairs of {tokens:,} tokens in {needed / 2**30:,.0f} GB of memory, and this "
            f"machine has {available / 2**30:,.0f}; set it to false"
        )
