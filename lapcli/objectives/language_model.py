"""Next-token prediction with a GPT: Muon for the block matrices, AdamW for embedding and head, bits per byte.

Shapes: B sequences, T tokens.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lapcli.checkpoint import Checkpoint, load_weights
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.data.text.tokens import TextData, TokenBatches, describe_source, prepare_text, tokenise
from lapcli.generation.engine import Engine, Sampling
from lapcli.heads.laplacian import operator_parameters
from lapcli.measures.tokens import bits_per_byte
from lapcli.models.compiling import pad_rows
from lapcli.models.gpt import GPT, LAMBDAS, GPTConfig, Linear
from lapcli.objectives.objective import LoadedModel, Objective, ParameterGroup, PlanFacts, decay_groups
from lapcli.objectives.weights import Weights, inherited_tokenizer, open_weights, tokenizer_of
from lapcli.recipe.optimizers import MuonSection
from lapcli.recipe.schema import GPTRecipe, LanguageModelRecipe, PlateauSchedule
from lapcli.runs import TOKENIZER, Run
from lapcli.runtime.devices import ComputePolicy, compute_policy, to_device
from lapcli.runtime.environment import check_compiler, runs_dir
from lapcli.runtime.errors import UsageError
from lapcli.runtime.progress import Progress, shown_progress
from lapcli.runtime.ranks import World

R = TypeVar("R", bound=GPTRecipe)


def gpt_config(recipe: GPTRecipe) -> GPTConfig:
    return GPTConfig(**recipe.model.model_dump(), vocab=recipe.tokenizer.vocab)


def learning_rate_multiplier(schedule: PlateauSchedule, step: int, steps: int) -> float:
    """Return the multiplier: linear warm-up, a plateau of 1, then linear warm-down to `final` at the end of the run."""
    warmup, warmdown = round(schedule.warmup * steps), round(schedule.warmdown * steps)
    if step < warmup:
        return (step + 1) / warmup  # not 0 in the first step, which would do nothing
    if step <= steps - warmdown:
        return 1.0
    left = (steps - step) / warmdown  # 1 / warmdown in the last update, not 0, as nanochat (base_train.py)
    return left + (1 - left) * schedule.final


def muon_momentum(optimizer: MuonSection, step: int) -> float:
    if step >= optimizer.momentum_warmup:
        return optimizer.momentum
    fraction = step / optimizer.momentum_warmup
    return (1 - fraction) * optimizer.momentum_start + fraction * optimizer.momentum


class GPTObjective(Objective[R]):
    """The common base of pretraining and chat training: the GPT, its optimizers and its tokenizer."""

    any_length = False  # the length of sequences differs between batches
    tokenizer: Tokenizer

    def build(self, device: torch.device, policy: ComputePolicy | None = None, *, is_initialised: bool = True) -> None:
        """Build the GPT; without `is_initialised` its weights are arbitrary, to be overwritten by loading."""
        train = self.recipe.train
        # A graph for any length gains less than one for a fixed length, so `auto` does not compile it.
        compiles = False if self.any_length and train.compile == "auto" else train.compile
        self.policy = policy or compute_policy(device, train.precision, compiles)
        with device if device.type == "meta" else contextlib.nullcontext():
            model = GPT(gpt_config(self.recipe), is_initialised=False)
        if is_initialised and device.type != "meta":
            # Initialised on the CPU, so that a seed gives the same weights on every device.
            model.initialise(torch.Generator().manual_seed(self.recipe.seed))
        model.policy = self.policy
        if self.policy.bf16:
            model.embed.to(torch.bfloat16)  # and with it all activations; the other weights stay float32
        self.model = model.to(device)
        if self.policy.compiles:
            check_compiler(device.type)
            model.use_compile(any_length=self.any_length)

    def shards(self) -> list[nn.Module]:
        return [*self.blocks(), self.model.embed]  # the embedding may be bf16, and a gather has one dtype

    def gathered_dtype(self, shard: nn.Module) -> torch.dtype | None:
        # Matmuls cast their weights to bf16 anyway; parameters of head operators stay in float32.
        learns = any(name.rpartition(".operators.")[1] for name, _ in shard.named_parameters())
        return torch.bfloat16 if self.policy.bf16 and not learns else None

    def parameter_groups(self) -> list[ParameterGroup]:
        """Group the parameters as nanochat does; the AdamW rates shrink with the width, Muon's does not.

        Any other optimizer updates all parameters at one rate.
        """
        recipe, model = self.recipe, self.model
        named, settings = dict(model.named_parameters()), recipe.optimizer
        if not isinstance(settings, MuonSection):  # recipe/loading.py put the section of another optimizer in its place
            return decay_groups(settings, named, {*operator_parameters(model), *LAMBDAS})
        width_factor = (recipe.model.width / settings.reference_width) ** -0.5
        adamw = {"betas": tuple(settings.betas), "eps": settings.eps, "weight_decay": settings.weight_decay}
        precision = settings.newton_schulz_precision
        bf16 = precision == "bf16" or (precision == "auto" and self.policy.bf16)
        muon = {"steps": settings.newton_schulz_steps, "dtype": torch.bfloat16 if bf16 else torch.float32}
        embedding, head = ({name: named.pop(name)} for name in ("embed.weight", "head.weight"))
        # Sorted, because the order of a set of names varies between processes, and sums over gradients with it.
        learned = {name: named.pop(name) for name in sorted(operator_parameters(model))}
        undecayed = {**adamw, "weight_decay": 0.0}
        # The head's rate in nanochat, before the recipe's factor for the width.
        operators = [ParameterGroup("operators", "adamw", 0.004 * width_factor, learned, undecayed)] if learned else []
        lambdas = {name: {name: named.pop(name)} for name in LAMBDAS if name in named}
        values = {name: named.pop(name) for name in list(named) if name.startswith("value_embed.")}
        # nanochat's of July 2026: these rates do not shrink with the width.
        constants = {"residual_lambdas": (0.005, (0.8, 0.95), 0.05), "x0_lambdas": (0.5, (0.96, 0.95), 0.0)}
        added = [
            ParameterGroup(name, "adamw", lr, lambdas[name], {**adamw, "betas": betas, "weight_decay": decay})
            for name, (lr, betas, decay) in constants.items()
            if name in lambdas
        ]
        if values:
            rate, options = settings.embedding_lr / 2 * width_factor, {"betas": (0.8, 0.995), "weight_decay": 0.01}
            added.append(ParameterGroup("value embeddings", "adamw", rate, values, {**adamw, **options}))
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
            *added,
        ]

    def synthetic_batch(self, examples: int, device: torch.device) -> Any:
        tokens_BT = torch.zeros(examples, self.recipe.model.context, dtype=torch.long, device=device)
        return [tokens_BT, tokens_BT]

    def loss(self, batch: Any) -> Tensor:
        tokens_BT, targets_BT = batch
        return self.model.loss(tokens_BT, targets_BT)

    def weights_metadata(self) -> dict[str, str]:
        return {**super().weights_metadata(), "tokenizer_sha256": self.tokenizer.sha256}

    def save_tokenizer(self, run: Run) -> None:
        # The tokenizer of changed data, which is refused later, must not replace the run's own.
        if self.world.is_main and run.info.get("tokenizer_sha256") in (None, self.tokenizer.sha256):
            self.tokenizer.save(run.path / TOKENIZER)

    @functools.cached_property
    def _byte_lengths(self) -> Tensor:
        return torch.from_numpy(self.tokenizer.byte_lengths().astype(np.int64)).to(self.world.device)

    def loss_totals(self, losses_BT: Tensor, targets_BT: Tensor) -> tuple[float, ...]:
        """Return the sum of the losses and the number of targets, then the losses and bytes of targets with bytes."""
        is_target = targets_BT >= 0
        # Clamped, because -1 (no target) would index the last token.
        bytes_BT = self._byte_lengths[targets_BT.clamp(min=0)] * is_target
        parts = losses_BT.sum(), is_target.sum(), losses_BT[bytes_BT > 0].sum(), bytes_BT.sum()
        return tuple(map(float, parts))

    def token_facts(self, steps: int | None) -> dict[str, Any]:
        """Return the fields of `PlanFacts` for batches of sequences as long as the context, counted in tokens."""
        tokens_per_step = self.recipe.train.batch * self.recipe.model.context
        tokens = None if steps is None else steps * tokens_per_step
        return {
            "steps": steps,
            "epochs": None if self.recipe.train.steps else self.recipe.train.epochs,
            "example": "sequences",
            "unit": "token",
            "units_per_example": self.recipe.model.context,
            "values": {"tokens_per_step": tokens_per_step, "tokens": tokens},
        }

    def check_samples(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse samples too long for the model before training starts, since they are only generated at the end."""
        wanted: int = self.recipe.validation.sample_tokens  # type: ignore[attr-defined]
        positions = gpt_config(self.recipe).positions
        longest = max(map(len, prompts), default=0)
        if prompts and longest + wanted > positions:
            raise UsageError(
                f"validation.sample_tokens: {wanted:,} tokens after a prompt of {longest:,} go beyond the model's "
                f"{positions:,} positions, which are 10 times model.context; lower it or shorten validation.prompts"
            )

    @classmethod
    def load(
        cls, run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False
    ) -> LoadedModel:
        recipe: Any = run.recipe
        tokenizer = tokenizer_of(run)
        # Evaluations have too many shapes to compile.
        changes = {"compile": False, **({"precision": "float32"} if float32 else {})}
        objective = cls(recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)}))
        objective.build(device, is_initialised=checkpoint is None)
        model = objective.model
        if checkpoint is not None:
            load_weights(checkpoint.weights, model, str(model.config.head_plan()))
        for module in model.modules():
            if isinstance(module, Linear):  # cast once to the dtype of the activations, as every use would
                module.to(model.embed.weight.dtype)
        return LoadedModel.from_run(run, checkpoint, model.eval(), device, tokenizer=tokenizer)


class LanguageModel(GPTObjective[LanguageModelRecipe]):
    unit = "tokens"

    def prepare(self, world: World, run: Run, initial: Weights | None) -> dict[str, Any]:
        tokenizer = inherited_tokenizer(self.recipe, run, initial) or self.recipe.tokenizer
        with shown_progress(world.is_main) as progress:
            data = prepare_text(self.recipe.data, tokenizer, progress=progress)
        self.use(data, world)
        self.save_tokenizer(run)
        return {"data": data.description, "data_sha256": data.identity, "tokenizer_sha256": data.tokenizer.sha256}

    def use(self, data: TextData, world: World) -> None:
        """Plan the batches of prepared text."""
        self.data, self.world, self.tokenizer = data, world, data.tokenizer
        recipe, train, context = self.recipe, self.recipe.train, self.recipe.model.context
        self.batches = self.plan_batches(world.size)
        self._sequences = TokenBatches(
            data.train, context=context, batch=train.batch, seed=recipe.seed, shuffled=recipe.data.shuffled
        )
        # The validation text in stream order: `shuffled` keeps the order.
        self._validation = TokenBatches(data.validation, context=context, batch=1, seed=0, shuffled=True)
        wanted = recipe.validation.tokens // context
        self._validation_sequences = max(1, min(wanted, self._validation.sequences_per_epoch))
        self._prompts = [[data.tokenizer.bos, *data.tokenizer.encode(prompt)] for prompt in recipe.validation.prompts]
        self.check_samples(self._prompts)
        sequences = int((train.epochs or 0) * self._sequences.sequences_per_epoch)
        self.steps = train.steps or max(1, sequences // train.batch)
        self.units_per_step = train.batch * context

    def batch(self, step: int, micro_step: int) -> list[Tensor]:
        """Return tokens and targets."""
        first = self.batches.first(micro_step, self.world.rank)
        return to_device(self._sequences.sequences(step, first, self.batches.micro_batch), self.world.device)

    def learning_rate_multiplier(self, step: int) -> float:
        return learning_rate_multiplier(self.recipe.schedule, step, self.steps)

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Measure the loss and bits per byte: nats / ln 2 / the raw bytes of the targets (special tokens have none)."""
        totals = np.zeros(4)
        for share in self.world.shares(self._validation_sequences, self.batches.micro_batch):
            stop_if_asked()  # a collective, so also with an empty share
            if not share:
                continue
            sequences = self._validation.sequences(0, share.start, len(share))
            tokens_BT, targets_BT = to_device(sequences, self.world.device)
            rows = self.batches.micro_batch if self.policy.compiles else len(share)  # compiled code has one shape
            losses_BT = self.model.loss(pad_rows(tokens_BT, rows), pad_rows(targets_BT, rows), reduction="none")
            totals += self.loss_totals(losses_BT[: len(share)], targets_BT)
        nats, targets, counted_nats, counted_bytes = self.world.sum(totals.tolist())
        return {
            "validation_loss": nats / targets,
            "validation_bits_per_byte": bits_per_byte(counted_nats, counted_bytes, "the held-out text"),
        }

    def describe_batch(self, step: int) -> str:
        return self._sequences.identity(step)

    def finish(self) -> dict[str, Any]:
        """Continue the recipe's prompts."""
        settings = self.recipe.validation
        if not settings.prompts:
            return {}
        sampling = Sampling(settings.sample_tokens, settings.temperature, settings.top_k, self.recipe.seed)
        completions = Engine(self.model).complete(self._prompts, sampling)  # past any end token
        return {
            "samples": [
                {"prompt": prompt, "continuation": self.tokenizer.decode(samples[0])}
                for prompt, samples in zip(settings.prompts, completions, strict=True)
            ]
        }

    @classmethod
    def fetch(cls, recipe: LanguageModelRecipe, progress: Progress, part: slice | None = None) -> dict[str, Any]:
        given = recipe.train.init_from
        initial = None if given is None else open_weights(given, runs_dir())
        tokenizer = inherited_tokenizer(recipe, None, initial) or recipe.tokenizer
        if part is not None:  # a complete fetch, or the run, combines the parts
            _, _, folders = tokenise(recipe.data, tokenizer, part, progress)
            return {"source": recipe.data.train, "parts": len(folders[part]), "of_parts": len(folders)}
        prepared = prepare_text(recipe.data, tokenizer, progress=progress)
        return {
            "source": recipe.data.train,
            **prepared.facts,
            "vocab": prepared.tokenizer.vocab_size,
            "identity": prepared.identity,
            "tokenizer_sha256": prepared.tokenizer.sha256,
        }

    def plan_facts(self) -> PlanFacts:
        return PlanFacts(data=describe_source(self.recipe.data), **self.token_facts(self.recipe.train.steps))
