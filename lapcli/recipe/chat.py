"""What a chat recipe may say: the stages that turn a pretrained GPT into one that answers.

A recipe has `stages:`, up to two, done in this order: `midtrain`, then `sft`. Each is a run of its own; what such a
run keeps is a `ChatStageRecipe`: the stage, the model it is of and the weights it started from.
"""

from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from lapcli.recipe.data_sources import PREFIX, Modality
from lapcli.recipe.optimizers import ChatOptimizer
from lapcli.recipe.schema import (
    AnyRecipe,
    CheckpointSection,
    GPTModel,
    GPTRecipe,
    InitFrom,
    PlateauSchedule,
    TokenizerSection,
    TrainSection,
    ValidationSection,
)
from lapcli.recipe.section import Count, Section, Text, Whole, combination, wrong_hub_name

StageName = Literal["midtrain", "sft"]
STAGES: tuple[StageName, ...] = ("midtrain", "sft")
GENERATED = ("simple_spelling", "spelling_bee")  # rows without end, made by our own code


class DataSet(Section):
    """One data set of a mixture."""

    modality: ClassVar[Modality] = "chat"

    name: Text
    # `conversations`: rows of messages; `questions`: pairs made from the built-in text; the two spelling tasks are
    # generated from a list of words.
    format: Literal["conversations", "multiple_choice", "gsm8k", "simple_spelling", "spelling_bee", "questions"]
    # `hub:OWNER/NAME`, https://..., `plugin:NAME`, a local file or folder; of words also `builtin` and `system`
    # (/usr/share/dict/words)
    source: Text = "builtin"
    files: Text | list[Text] | None = None  # names, ranges such as a_{00..23}.parquet, local globs; in order
    revision: Text | None = None  # of the hub data set
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # of a file behind https
    rows: Count | None = None  # the first so many of the data set's order; none: all
    repeats: Annotated[Whole, Field(ge=1, le=1000)] = 1  # times that each row is in an epoch
    split: Literal["train", "test"] = "train"  # of generated rows

    @combination("source", "format")
    def _source_of_the_format(self) -> str | None:
        made_here = (*GENERATED, "questions")
        if self.source in ("builtin", "system") and self.format not in made_here:
            return f"`{self.source}` has no {self.format}; expected hub:OWNER/NAME, https://... or a file"
        if self.format == "questions" and self.source != "builtin":
            return "questions are made from the built-in text alone; remove it"
        if self.format in GENERATED and self.source.startswith(PREFIX):
            return "the words come from `builtin`, `system`, hub:OWNER/NAME, https://... or a file"
        return wrong_hub_name(self.source)

    @combination("files", "source")
    def _files_of_the_source(self) -> str | None:
        if self.source.startswith("hub:") and (self.files is None or any(mark in str(self.files) for mark in "*?")):
            return "name the hub data set's files, so that the list is fixed by the recipe"
        if self.files is not None and self.source.startswith(("https://", "builtin", "system", PREFIX)):
            return "means nothing for this source; remove it"
        return None

    @combination("revision", "source")
    def _revision_of_the_hub(self) -> str | None:
        if self.revision is not None and not self.source.startswith("hub:"):
            return "only a hub data set (source: hub:OWNER/NAME) has one; remove it"
        return None

    @combination("sha256", "source")
    def _hash_of_a_download(self) -> str | None:
        if self.sha256 is not None and not self.source.startswith("https://"):
            return "is of a file behind https; remove it"
        return None

    @combination("rows", "format")
    def _generated_rows(self) -> str | None:
        return "say how many rows to generate" if self.format in GENERATED and self.rows is None else None

    @combination("split", "format")
    def _split_of_generated_rows(self) -> str | None:
        if self.split != "train" and self.format not in GENERATED:
            return "is for generated rows; name the test files instead"
        return None


Mixture = Annotated[list[DataSet], Field(min_length=1, max_length=100)]


class ChatValidation(ValidationSection):
    """Rows held out, batched and weighted as in training; and prompts that are answered at the end."""

    mixture: Annotated[list[DataSet], Field(max_length=100)] = Field(default_factory=list)
    tokens: Count = 10_485_760  # at most, of packed batches
    rows: Count = 3200  # at most, of padded batches
    prompts: list[Annotated[str, Field(max_length=10_000)]] = Field(default_factory=list)
    sample_tokens: Annotated[Whole, Field(ge=1, le=100_000)] = 64
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    top_k: Count | None = None


class StageSettings(Section):
    """What a stage trains on and how; `train.batch` counts packed sequences or padded conversations."""

    mixture: Mixture
    loss: Literal["all", "assistant"]  # the tokens that are targets
    batching: Literal["packed", "padded"]  # one stream cut into sequences, or a conversation a row
    # `tokens`: each target of a step has the same weight. `micro_batch`: the mean of the means of micro-batches of
    # exactly train.micro_batch rows, as upstream.
    average: Literal["tokens", "micro_batch"] = "tokens"
    skip_malformed: bool = False  # conversations that cannot be rendered: leave them out instead of stopping
    # The schedule counts the last step of the epoch, but it is not taken (upstream's fine-tuning: 700 of 701).
    drop_last_update: bool = False

    @combination("average", "batching")
    def _packed_rows_weigh_the_same(self) -> str | None:
        if self.average == "micro_batch" and self.batching == "packed":
            return "packed micro-batches have the same number of tokens; use tokens"
        return None


class Stage(StageSettings):
    train: TrainSection
    optimizer: ChatOptimizer = ChatOptimizer()
    schedule: PlateauSchedule = PlateauSchedule()
    validation: ChatValidation = ChatValidation()
    checkpoint: CheckpointSection = CheckpointSection()

    @combination("drop_last_update", "train")
    def _something_is_left(self) -> str | None:
        if self.drop_last_update and self.train.steps is not None:
            return "counts the steps of an epoch; give train.epochs instead of train.steps"
        return None


class Stages(Section):
    midtrain: Stage | None = None
    sft: Stage | None = None

    @combination("midtrain", "sft")
    def _has_one(self) -> str | None:
        return "give midtrain, sft or both" if self.midtrain is None and self.sft is None else None

    @combination("sft", "midtrain")
    def _first_begins(self) -> str | None:
        if self.midtrain is not None and self.sft is not None and self.sft.train.init_from is not None:
            return "train.init_from is for the first stage: sft begins with the weights of midtrain"
        return None

    def given(self) -> dict[StageName, Stage]:
        stages: dict[StageName, Stage | None] = {"midtrain": self.midtrain, "sft": self.sft}
        return {name: stage for name, stage in stages.items() if stage is not None}


class ChatRecipe(AnyRecipe):
    """For `lap sft`: the model comes from the pretrained run."""

    objective: Literal["chat"]
    stages: Stages


class StartSection(Section):
    """The weights that a stage began with."""

    run: Text  # its name, in the same folder of runs
    weights_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ChatStageRecipe(StageSettings, GPTRecipe):
    """What a run of one stage keeps."""

    objective: Literal["chat"]
    stage: StageName
    model: GPTModel
    tokenizer: TokenizerSection
    start: StartSection | None = None  # none: train.init_from says
    optimizer: ChatOptimizer
    schedule: PlateauSchedule
    validation: ChatValidation


class PretrainedGPT(Protocol):
    """What a stage takes over from the model that it starts from."""

    @property
    def model(self) -> GPTModel: ...

    @property
    def tokenizer(self) -> TokenizerSection: ...


def stage_recipe(
    recipe: ChatRecipe,
    name: StageName,
    gpt: PretrainedGPT,
    run: str | None,
    weights_sha256: str,
    init_from: InitFrom | None = None,
) -> ChatStageRecipe:
    """The recipe of one stage's run, on the model of the run it starts from; without a run, of `init_from`."""
    stage = recipe.stages.given()[name]
    return ChatStageRecipe(
        objective="chat",
        stage=name,
        seed=recipe.seed,
        model=gpt.model,
        tokenizer=gpt.tokenizer,
        start=None if run is None else StartSection(run=run, weights_sha256=weights_sha256),
        train=stage.train.model_copy(update={"init_from": init_from}),
        **{key: getattr(stage, key) for key in type(stage).model_fields if key != "train"},
    )
