"""The schema of optimizers: one section for each, chosen by `optimizer.name`.

The optimizers themselves are in `lapcli/training/optimizers`. A package that adds one also supplies its section, a
subclass of `OptimizerSection`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from lapcli.recipe.section import NonNegative, Positive, Section, Text, Whole
from lapcli.runtime.plugins import Registry

Beta = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[list[Beta], Field(min_length=2, max_length=2)]
#: Keys that the objective and the loop read; every other key is an option of the optimizer itself.
SHARED = frozenset({"name", "lr", "weight_decay", "clip"})


class OptimizerSection(Section):
    """The keys that every optimizer has."""

    lr: Positive  # peak learning rate
    weight_decay: NonNegative = 0.0  # decoupled from the gradient
    clip: Positive | None = None  # global norm of the averaged gradient
    name: Text = "adamw"  # an installed optimizer

    def options(self) -> dict[str, Any]:
        """Return the optimizer's arguments besides learning rate and weight decay."""
        values = {key: getattr(self, key) for key in type(self).model_fields if key not in SHARED}
        return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


class AdamWSection(OptimizerSection):
    """AdamW, or LAMB with its own clipping; no decay for biases, norms, LayerScale, positions and the class token."""

    name: Literal["adamw", "lamb"] = "adamw"
    betas: Pair = Field(default_factory=lambda: [0.9, 0.999])  # of the first and the second moment
    eps: Positive = 1e-8  # added to the root of the second moment
    clip: Positive | None = 1.0

    def options(self) -> dict[str, Any]:
        return {**super().options(), **({"max_grad_norm": self.clip} if self.name == "lamb" else {})}


class MuonSection(OptimizerSection):
    """Muon for the block matrices, AdamW for the embedding and the head."""

    name: Literal["muon"] = "muon"
    lr: Positive = 0.02  # of Muon, times sqrt(max(1, out/in)) of each matrix
    momentum: Beta = 0.95  # of Muon, after its warm-up
    momentum_start: Beta = 0.85  # of Muon, in the first step
    momentum_warmup: Annotated[Whole, Field(ge=0, le=10**9)] = 300  # steps from momentum_start to momentum
    newton_schulz_steps: Annotated[Whole, Field(ge=1, le=50)] = 5  # iterations that orthogonalise an update
    newton_schulz_precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: as train.precision
    embedding_lr: Positive = 0.2  # of the embedding: AdamW
    head_lr: Positive = 0.004  # of the output layer: AdamW
    reference_width: Positive = 768.0  # the AdamW rates are multiplied by (width / reference_width)^(-1/2)
    betas: Pair = Field(default_factory=lambda: [0.8, 0.95])  # of AdamW
    eps: Positive = 1e-10  # of AdamW
    weight_decay: NonNegative = 0.0  # of AdamW; Muon has none
    clip: Positive | None = 1.0


class ChatOptimizer(MuonSection):
    lr_scale: Positive = 1.0  # of all three learning rates
    momentum_warmup: Annotated[Whole, Field(ge=0, le=10**9)] = 0
    weight_decay: NonNegative = 0.0
    clip: Positive | None = None  # upstream clips only in pretraining


class DinoOptimizer(OptimizerSection):
    """AdamW with layer-wise learning rates; backbone and both heads are clipped separately."""

    name: Literal["adamw"] = "adamw"
    lr_scaling: Literal["none", "sqrt4"] = "none"  # sqrt4: lr is multiplied by 4 sqrt(batch / 1024)
    betas: Pair = Field(default_factory=lambda: [0.9, 0.999])  # of the first and the second moment
    eps: Positive = 1e-8  # added to the root of the second moment
    weight_decay: NonNegative = 0.04  # at the start
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 0.95  # a block's rate is that of the next block times this
    patch_embed_lr: Positive = 0.2  # factor on the rate that it would have otherwise
    clip: Positive | None = 3.0


#: Sections that any recipe with `takes_any_optimizer` may use. Muon is not among them: the GPT decides which parameters
#: Muon and AdamW update.
OPTIMIZER_SECTIONS: Registry[type[OptimizerSection]] = Registry(
    "optimizer section",
    {"adamw": "lapcli.recipe.optimizers:AdamWSection", "lamb": "lapcli.recipe.optimizers:AdamWSection"},
)
