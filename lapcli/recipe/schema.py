"""The schema of recipes: one typed model for each section, and one recipe for each objective.

An unknown key is refused, and no key is parsed and then ignored. Batch sizes are global.
"""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from lapcli.heads.plan import HeadPlan, head_plan
from lapcli.recipe.optimizers import MuonSection, OptimizerSection
from lapcli.recipe.section import (
    Count,
    Files,
    Fraction,
    HeldOut,
    Modality,
    Positive,
    Section,
    Size,
    Text,
    Whole,
    combination,
    unfixed_files,
    wrong_hub_name,
)

GATE_CHANNELS = 12  # of a GPT's stream, which the gates of value embeddings read


class TransformerModel(Section):
    """The keys that all models share: their blocks, and the operators of their heads."""

    layers: Annotated[Whole, Field(ge=1, le=1000)]  # blocks
    width: Size  # size of a token
    heads: Annotated[Whole, Field(ge=1, le=1024)]  # attention heads of a layer, Laplacian ones included
    # Laplacian heads of each layer; they are the last of its heads.
    laplacian_heads: Whole | list[Whole] | str | dict[str, Any] = Field(
        default=0, description="a number, a list with one number a layer, `linear(a, b)` or {layers:, heads:}"
    )
    # Heads by operator: {laplacian: 3, exclusive: 2}; `laplacian_heads: 3` is short for {laplacian: 3}.
    operators: dict[str, Any] | list[dict[str, Any]] | None = Field(
        default=None,
        description="operators with their heads such as {laplacian: 3, exclusive: 2}, or a list of these, one a layer",
    )

    @combination("width", "heads")
    def _heads_divide_the_width(self) -> str | None:
        return f"{self.width} is not a multiple of heads {self.heads}" if self.width % self.heads else None

    @combination("operators", "laplacian_heads")
    def _one_form(self) -> str | None:
        is_both = self.operators is not None and self.laplacian_heads != 0
        return "set either operators or laplacian_heads, not both" if is_both else None

    @combination("operators", "layers", "heads")
    def _operators_fit(self) -> str | None:
        return None if self.operators is None else self._wrong_plan()

    @combination("laplacian_heads", "layers", "heads")
    def _laplacian_heads_fit(self) -> str | None:
        return self._wrong_plan() if self.operators is None else None

    def _wrong_plan(self) -> str | None:
        try:
            self.head_plan()
        except ValueError as error:
            return str(error)
        return None

    def head_plan(self) -> HeadPlan:
        spec = {"laplacian": self.laplacian_heads} if self.operators is None else self.operators
        return head_plan(spec, self.layers, self.heads)


class GPTModel(TransformerModel):
    """The GPT: `lapcli/models/gpt.py`."""

    kv_heads: Annotated[Whole, Field(ge=1, le=1024)] | None = None  # null: as many as heads
    context: Size = 2048  # tokens in a training sequence
    rotary_base: Annotated[float, Field(gt=1, le=1e9)] | None = 10_000.0  # of the rotary positions; null: none
    rotary_precision: Literal["float32", "bf16"] = "float32"  # of the rotary tables; bf16: as nanochat
    # Beyond 50 the sum of exp over a large vocabulary would overflow float32.
    softcap: Annotated[float, Field(gt=0, le=50)] = 15.0  # logits are limited to this: softcap * tanh(logits / softcap)
    # Parts of nanochat's model of 2026; without them their parameters do not exist.
    residual_lambdas: bool = False  # the stream times a learned number before each block
    x0_lambdas: bool = False  # plus the first block's input times another
    value_embeddings: bool = False  # in every other layer, gated, added to the values

    @combination("value_embeddings", "width")
    def _gates_fit(self) -> str | None:
        is_narrow = self.value_embeddings and self.width < GATE_CHANNELS
        return f"their gates read {GATE_CHANNELS} channels, and width is {self.width}" if is_narrow else None

    @combination("width", "heads")
    def _head_size_is_even(self) -> str | None:
        if self.width % (2 * self.heads) == self.heads:
            return f"the head size {self.width // self.heads} (width / heads) must be even for rotary"
        return None

    @combination("kv_heads", "heads")
    def _kv_heads_divide_the_heads(self) -> str | None:
        if self.kv_heads and self.heads % self.kv_heads:
            return f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}"
        return None


class TokenizerSection(Section):
    """Trained once and shared between runs on the same text, unless `file` names one."""

    file: Text | None = None  # a tokenizer.json to use instead of training one
    vocab: Annotated[Whole, Field(ge=256 + 9, le=2**20)] = 65_536  # nine special tokens included
    train_chars: Count = 2_000_000_000  # training stops after this many characters
    train_crop: Count = 10_000  # characters of each document that it sees


class Source(Section):
    """Source of examples: `builtin`, `hub:OWNER/NAME`, `plugin:NAME`, or a local file or folder."""

    # `builtin`, `hub:OWNER/NAME`, `plugin:NAME`, or a local file or folder.
    train: Text
    revision: Text | None = None  # of the hub data set

    @combination("train")
    def _hub_name(self) -> str | None:
        return wrong_hub_name(self.train)

    def ignored(self) -> dict[str, str]:
        has_none = self.revision is not None and not self.train.startswith("hub:")
        return {"revision": "only a hub data set has one"} if has_none else {}


#: Prefix of a run's name in `train.init_from`.
RUN = "run:"
TIMM = "timm:"
#: Value of `data.train` for an imported run, whose training data is not known.
UNKNOWN = "unknown:"


class TextSource(Source):
    modality: ClassVar[Modality] = "text"

    files: Files = None  # files of the source, in order; null: all of a folder
    column: Text = "text"  # of parquet and jsonl files: the key of the text
    crop: Count | None = None  # characters kept of each document
    shuffled: bool = False  # the source is in random order already
    # Held-out fraction of the documents; null: the last of several files, or a twentieth of a single one.
    validation: HeldOut | None = None

    @combination("files", "train")
    def _files_of_the_source(self) -> str | None:
        return "name at least one file, or remove it" if self.files == [] else unfixed_files(self.train, self.files)

    def ignored(self) -> dict[str, str]:
        has_none = self.files is not None and self.train == "builtin"
        return super().ignored() | ({"files": "the built-in text has no files"} if has_none else {})


class InitFrom(Section):
    """The initial weights of a run: `run:NAME[@step|best]`, `timm:NAME`.

    A recipe may give the source alone. The stored recipe of a run has the sha256 too, which identifies the weights.
    """

    source: Text  # `run:NAME[@step|best]`, `timm:NAME`
    weights: Text | None = None  # a file that replaces timm's own weights
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # of the file with the weights

    @model_validator(mode="before")
    @classmethod
    def _source_alone(cls, given: Any) -> Any:
        return {"source": given} if isinstance(given, str) else given


class TrainSection(Section):
    """Length, batches, precision and device of the training."""

    batch: Count  # sequences or images of one optimizer step, over all processes
    micro_batch: Count  # at most this many that one process takes in one forward
    steps: Count | None = None  # optimizer steps of the run
    epochs: Positive | None = None  # used if no steps are given
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on GPUs with bf16 hardware
    compile: Literal["auto"] | bool = Field(default="auto", description="`auto`, true or false")  # auto: on CUDA
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: CUDA, then Apple GPUs, then the CPU
    threads: Annotated[Whole, Field(ge=1, le=1024)] | None = None  # CPU threads of each process
    # State sharded over several processes: gradients and optimizer state (ZeRO-2), or the weights too (ZeRO-3).
    shard: Literal["gradients", "weights"] = "gradients"
    recompute: Literal["none", "blocks"] = "none"  # blocks: keep only their inputs for the backward
    # On CUDA: bitwise reproducible but slower; runs on the CPU always are.
    deterministic: bool = False
    init_from: InitFrom | None = None  # null: random weights from the seed

    @combination("micro_batch", "batch")
    def _micro_batch_fits(self) -> str | None:
        if self.micro_batch > self.batch:
            return f"{self.micro_batch} exceeds the global batch {self.batch}; give at most {self.batch}"
        return None

    @combination("steps", "epochs")
    def _has_a_length(self) -> str | None:
        return "give steps or epochs" if self.steps is None and self.epochs is None else None


class PlateauSchedule(Section):
    """Warm-up, plateau, then linear warm-down, as fractions of all steps."""

    warmup: Fraction = 0.0  # of all steps: linear from 0
    warmdown: Fraction = 0.2  # of all steps: linear to `final`
    final: Fraction = 0.0  # multiplier at the end of the warm-down

    @combination("warmdown", "warmup")
    def _parts_fit(self) -> str | None:
        if self.warmup + self.warmdown > 1:
            return f"warmup {self.warmup} and warmdown {self.warmdown} exceed the run"
        return None


class ValidationSection(Section):
    """Schedule and data of the validation."""

    every: Count | None = None  # steps; the first and the last are always validated; null: only those


class TextValidation(ValidationSection):
    every: Count | None = 250
    tokens: Count = 10_485_760  # at most, of the held-out text
    # Prompts continued at the end of the run.
    prompts: list[Annotated[str, Field(max_length=10_000)]] = Field(default_factory=list)
    sample_tokens: Annotated[Whole, Field(ge=1, le=100_000)] = 16  # of each continuation
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0  # of the continuations; 0: always the likeliest token
    top_k: Count | None = None  # sample from the likeliest tokens only; null: from all


class CheckpointSection(Section):
    """When weights and optimizer state are saved, and how many of them are kept."""

    every: Count | None = None  # steps; the last step is always saved
    keep: Annotated[Whole, Field(ge=1, le=10**6)] = 2  # newest checkpoints kept
    asynchronous: bool = False  # write a copy while the training continues; it needs memory for one more state


TEXT_METRICS: dict[str, tuple[str, Literal["higher", "lower"]]] = {
    "validation_loss": ("nats", "lower"),
    "validation_bits_per_byte": ("bits", "lower"),
}
#: Abilities of models, which evaluations and analyses require.
LANGUAGE = "language"  # next tokens of text, with a tokenizer
CHAT = "chat"  # answers in conversations
HELD_OUT_TEXT = "held-out text"  # as in the recipe's `data`, `tokenizer` and `validation`
CLASSES = "classes"  # a class for each image
FEATURES = "features"  # class token and patches of an image


class AnyRecipe(Section):
    """The keys of every recipe, and the facts about its objective that need no torch."""

    implementation: ClassVar[str]  # `module:Class` of the `Objective`, imported when a run is trained or loaded
    gives: ClassVar[frozenset[str]]  # what its models can do
    #: Metrics of a validation with their unit and the direction that is better; a search may optimise them.
    metrics: ClassVar[dict[str, tuple[str, Literal["higher", "lower"]]]]
    data_identity_has_seed: ClassVar[bool] = False  # `data_sha256` of runs with another seed differs

    objective: str  # what is trained
    seed: Annotated[Whole, Field(ge=0, lt=2**31)] = 0  # of weights, order of the data and augmentation
    # Trackers that mirror the metrics. They do not affect the training, so a run does not store them in its recipe.
    track: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list, exclude=True)

    @classmethod
    def objective_name(cls) -> str:
        """Return the `objective` of its recipes."""
        return str(get_args(cls.model_fields["objective"].annotation)[0])

    def schedule_problems(self) -> list[tuple[str, str]]:
        """Return the keys that conflict with the length of the run, each with the reason.

        Checked before a run starts, but not for the stored recipe of a run.
        """
        return []


class BaseRecipe(AnyRecipe):
    """The keys of every recipe that is trained as one run."""

    #: Whether `optimizer.name` may name any installed optimizer, and not only those of the recipe's section.
    takes_any_optimizer: ClassVar[bool] = False

    train: TrainSection
    optimizer: OptimizerSection
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def paper_recipe(self) -> str | None:
        """Return the name of the paper's recipe that is nearest to this one; None if there is none."""
        return None

    @property
    def micro_batch_counts(self) -> bool:
        """Whether the micro-batch size changes results by more than rounding."""
        return False


class GPTRecipe(BaseRecipe):
    """A run that trains a GPT."""

    model: GPTModel
    tokenizer: TokenizerSection = TokenizerSection()
    optimizer: MuonSection = MuonSection()
    schedule: PlateauSchedule = PlateauSchedule()


class LanguageModelRecipe(GPTRecipe):
    """Next-token prediction with a GPT."""

    implementation = "lapcli.objectives.language_model:LanguageModel"
    gives = frozenset({LANGUAGE, HELD_OUT_TEXT})
    metrics = TEXT_METRICS
    takes_any_optimizer = True

    objective: Literal["language_model"]
    data: TextSource
    validation: TextValidation = TextValidation()

    def paper_recipe(self) -> str:
        return "gpt561m"
