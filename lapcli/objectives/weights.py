"""Weights by name, and runs that start from them: `train.init_from`.

    run:NAME[@step|best]     a run, finished or not; without a suffix its last checkpoint, as for the run's FOLDER
    timm:NAME                a stock ViT with its pretrained weights, or those of a file

Tensors are returned under our own names. No code is executed: only safetensors, JSON and pickles of tensors are read.
A run that starts from weights stores their sha256 in its recipe, which identifies them. Only the weights are loaded;
the rest of the run is new. A run that has a checkpoint resumes from that, and the source is not read again.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

from lapcli import checkpoint
from lapcli.checkpoint import check_tensors, read_tensors
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.heads.plan import HeadPlan, head_plan
from lapcli.models.dino_vit import StudentTeacher
from lapcli.objectives.loading import build_timm, find_checkpoint, read_timm, timm_file
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.schema import RUN, TIMM, UNKNOWN, BaseRecipe, GPTRecipe, InitFrom, Source, TextSource
from lapcli.runs import INFO, SOURCES_OF_WEIGHTS, TOKENIZER, Run, check_start, named_run, read_run
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file

Recipe = TypeVar("Recipe", bound=BaseRecipe)
REMEDY = "change the recipe's model, or start from other weights"
_NETWORKS, _BACKBONES = ("student.", "teacher."), ("student.backbone.", "teacher.backbone.")
_PATCHES = "patch_embed.proj.weight"
_LAYER_SCALE = re.compile(r"\.(ls[12]\.gamma|gamma_[12])$")
_SHOWN = 8  # names in a message
_CLASSIFIER = ("head.weight", "head.bias")


@dataclass(frozen=True)
class Weights:
    """Weights by the name of their source; `read` loads them."""

    shown: str  # for people
    file: Path
    sha256: str  # of the file
    read: Callable[[], dict[str, Tensor]] = field(repr=False)
    plan: HeadPlan
    model: Mapping[str, Any]  # what is known about the recipe's `model`
    tokenizer: Callable[[], Tokenizer] | None = field(default=None, repr=False)


def open_weights(given: InitFrom, runs_dir: Path) -> Weights:
    """Find a source; UsageError or DataError with the next step if it is missing, incomplete or unrecognised."""
    source = given.source
    check_start(source, runs_dir)
    if source.startswith(RUN):
        name, _, which = source.removeprefix(RUN).partition("@")
        return _of_run(named_run(runs_dir, name), which or "last")
    if source.startswith(TIMM):
        return _of_timm(source, None if given.weights is None else Path(given.weights).expanduser())
    path = Path(source).expanduser()
    if (path / INFO).is_file():
        return _of_run(named_run(runs_dir, str(path)), "last")
    raise UsageError(f"{path} has no weights that lap can read; {SOURCES_OF_WEIGHTS}")


def _of_run(run: Run, which: str) -> Weights:
    checkpoint = find_checkpoint(run, which)
    recipe: Any = run.recipe
    is_gpt = (run.path / TOKENIZER).is_file()
    return Weights(
        shown=f"{run.path}, step {checkpoint.step}",
        file=checkpoint.weights,
        sha256=checkpoint.weights_sha256,
        read=lambda: read_tensors(checkpoint.weights),
        plan=recipe.model.head_plan(),
        model=recipe_to_dict(recipe)["model"],
        tokenizer=(lambda: _tokenizer_of(run)) if is_gpt else None,
    )


def _tokenizer_of(run: Run) -> Tokenizer:
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    return tokenizer


def _of_timm(name: str, weights: Path | None) -> Weights:
    model: Any = build_timm(name)
    file = timm_file(name, model, weights)
    attention = model.blocks[0].attn
    layers, patches = len(model.blocks), model.patch_embed
    return Weights(
        shown=f"{name}, {file.name}",
        file=file,
        sha256=sha256_of_file(file),
        read=lambda: read_timm(model, file),
        plan=head_plan(0, layers, int(attention.num_heads)),
        model={
            "layers": layers,
            "width": int(model.embed_dim),
            "heads": int(attention.num_heads),
            "image": int(patches.img_size[0]),
            "patch": int(patches.patch_size[0]),
        },
    )


def source_run(run: Run) -> Run | None:
    """Return the run that supplied a run's initial weights; None if they came from elsewhere."""
    given = run.recipe.train.init_from
    if given is None:
        return None
    if given.source.startswith(RUN):
        return named_run(run.path.parent, given.source.removeprefix(RUN).partition("@")[0])
    path = Path(given.source).expanduser()
    return read_run(path) if (path / INFO).is_file() else None


def text_of(run: Run) -> tuple[Run, Source]:
    """Return the text that a GPT was pretrained on, on which a chat stage is measured too, and the run that has it."""
    if not isinstance(run.recipe, ChatStageRecipe):
        return run, run.recipe.data  # type: ignore[attr-defined]
    before = source_run(run)
    return (run, TextSource(train=UNKNOWN)) if before is None else text_of(before)


def with_sha256(recipe: Recipe, path: Path, fresh: bool = False) -> Recipe:
    """Return the recipe with the sha256 of the weights that its run at `path` starts from, or has started from."""
    given = recipe.train.init_from
    if given is None or given.sha256 is not None:
        return recipe
    known = None
    if not fresh and (path / INFO).is_file():
        with contextlib.suppress(UsageError):  # opening the run will report what is wrong with it
            before = read_run(path).recipe.train.init_from
            if before is not None and (before.source, before.weights) == (given.source, given.weights):
                known = before.sha256
    section = given.model_copy(update={"sha256": known or open_weights(given, path.parent).sha256})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"init_from": section})})


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from; `source` is None if the run has a checkpoint to resume from."""

    run: Run
    given: InitFrom
    source: Weights | None

    @classmethod
    def of(cls, recipe: BaseRecipe, run: Run) -> "InitialWeights | None":
        """Find a run's initial weights; None if they are initialised at random."""
        given = recipe.train.init_from
        if given is None:
            return None
        # Silent about damaged checkpoints: the loop reports them when it resumes.
        if checkpoint.newest(run.checkpoints, warn=lambda text: None) is not None:
            return cls(run, given, None)
        source = open_weights(given, run.path.parent)
        if source.sha256 != given.sha256:
            raise DataError(
                f"train.init_from: {given.source} is not what {run.path} started from (sha256 "
                f"{source.sha256[:16]}, not {str(given.sha256)[:16]}); restore them, or use --fresh"
            )
        return cls(run, given, source)

    def tokenizer(self, recipe: GPTRecipe) -> Tokenizer:
        """Return the tokenizer that the weights were trained with; its vocabulary must match the recipe's."""
        saved = self.run.path / TOKENIZER
        if "tokenizer_sha256" in self.run.info and saved.is_file():
            tokenizer = Tokenizer.from_file(saved)
            self.run.check_tokenizer(tokenizer.sha256)
            return tokenizer
        return tokenizer_for(self.source or open_weights(self.given, self.run.path.parent), recipe)

    def load(self, model: nn.Module, recipe: BaseRecipe) -> list[str]:
        """Load the weights into the model; return lines for the log, among them what differs from the source."""
        if self.source is None:
            return []
        changed = [*_changes(self.source, recipe), *fit_weights(self.source, model)]
        head = f"starts from {self.source.shown}, weights sha256 {self.source.sha256[:16]}"
        return [head, *(f"  {line}" for line in changed)]


def tokenizer_for(source: Weights, recipe: GPTRecipe) -> Tokenizer:
    named = recipe.tokenizer.file
    if source.tokenizer is None and named is None:
        raise UsageError(
            f"{source.file} comes without a tokenizer, which a GPT needs; start from other weights, or name their "
            "tokenizer with --set tokenizer.file=FILE"
        )
    tokenizer = source.tokenizer() if source.tokenizer else Tokenizer.from_file(Path(str(named)).expanduser())
    if tokenizer.vocab_size != recipe.tokenizer.vocab:
        raise UsageError(
            f"the tokenizer of {source.shown} has {tokenizer.vocab_size:,} tokens, tokenizer.vocab is "
            f"{recipe.tokenizer.vocab:,}; use --set tokenizer.vocab={tokenizer.vocab_size}"
        )
    return tokenizer


def _changes(source: Weights, recipe: Any) -> list[str]:
    """Describe how the recipe's model differs from that of the weights."""
    plan, current, lines = recipe.model.head_plan(), recipe_to_dict(recipe)["model"], []
    if source.plan != plan:
        each = "" if len(source.plan.per_layer) != len(plan.per_layer) else f" ({source.plan} there, {plan} here)"
        lines.append(f"head plan: {source.plan.total} Laplacian heads there, {plan.total} here{each}")
    for key, before in source.model.items():
        if key in current and key not in ("laplacian_heads", "operators") and before != current[key]:
            lines.append(f"model.{key}: {before} there, {current[key]} here")
    return lines


def fit_weights(source: Weights, model: nn.Module) -> list[str]:
    """Load the tensors that fit and return what was resized, newly initialised or not used.

    DataError for a shape that cannot be resized, or if no name is in common.
    """
    expected, tensors, lines = model.state_dict(), source.read(), list[str]()
    is_pair = any(name.startswith(_NETWORKS) for name in tensors)  # of student and teacher
    targets = {name: name for name in expected}  # name in the model: name in the source
    if isinstance(model, StudentTeacher) and not is_pair:  # a backbone is loaded into both
        targets = {name: name.split(".", 2)[2] for name in expected if name.startswith(_BACKBONES)}
    elif is_pair and not isinstance(model, StudentTeacher):  # only the teacher's backbone is loaded
        tensors = {name.removeprefix(_BACKBONES[1]): tensor for name, tensor in tensors.items()}
    wanted = {name: expected[target] for target, name in targets.items()}
    redrawn = _adapt_vit(tensors, wanted, lines) if _PATCHES in wanted else []
    loaded = {target: tensors[name] for target, name in targets.items() if name in tensors and name not in redrawn}
    if not loaded:
        first, expected_first = next(iter(tensors), "nothing"), next(iter(expected))
        raise DataError(
            f"no tensor name in {source.file} matches the model (file: {first}, model: {expected_first}); "
            "start from other weights"
        )
    missing = [name for name in expected if name not in loaded and targets.get(name) not in redrawn]
    unused = [name for name in tensors if name not in targets.values()]
    check_tensors(source.file, loaded, {target: expected[target] for target in loaded}, REMEDY)
    model.load_state_dict(loaded, strict=False)  # what is not loaded is named in the result
    if missing:
        lines.append(f"not in the source, newly initialised: {_listed(missing)}")
    if unused:
        lines.append(f"in the source, not used: {_listed(unused)}")
    return lines


def _listed(names: list[str]) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _adapt_vit(tensors: dict[str, Tensor], expected: Mapping[str, Tensor], lines: list[str]) -> list[str]:
    """Adapt the tensors of a ViT to another image or block; return the names that keep their random values.

    `expected` has the model's tensors under the source's names.
    """
    _rename_layer_scale(tensors, expected)
    _resize_positions(tensors, expected, lines)
    scales = [name for name in expected if _LAYER_SCALE.search(name)]
    if any(_LAYER_SCALE.search(name) for name in tensors):
        if not scales:
            raise UsageError(
                "the weights were trained with LayerScale, and model.layer_scale is null: set it, for example with "
                "--set model.layer_scale=1e-4"
            )
    elif scales and "blocks.0.norm1.weight" in tensors:
        tensors |= {name: expected[name].new_ones(expected[name].shape) for name in scales}
        lines.append(f"LayerScale: the source has none, so it starts at 1 ({len(scales)} tensors)")
    classifier = [name for name in _CLASSIFIER if name in tensors and name in expected]
    redrawn = [name for name in classifier if len(tensors[name]) != len(expected[name])]
    if redrawn:
        before_K, now_K = len(tensors[redrawn[0]]), len(expected[redrawn[0]])
        lines.append(f"{', '.join(redrawn)}: newly initialised, {before_K:,} classes there, {now_K:,} here")
    return redrawn


def _rename_layer_scale(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Rename LayerScale: `gamma_1` in self-supervised models and timm's EVA is `ls1.gamma` in its plain ViTs."""
    for name in list(tensors):
        for theirs, ours in ((r"\.gamma_([12])$", r".ls\1.gamma"), (r"\.ls([12])\.gamma$", r".gamma_\1")):
            renamed = re.sub(theirs, ours, name)
            if renamed != name and name not in expected and renamed in expected:
                tensors[renamed] = tensors.pop(name)


def _resize_positions(tensors: dict[str, Tensor], expected: Mapping[str, Tensor], lines: list[str]) -> None:
    """Resize the positions of the patches to the model's; that of the class token is added to the class token itself.

    Shapes: P positions, C channels.
    """
    if "pos_embed" not in tensors or "pos_embed" not in expected:
        return
    before_1PC, now = tensors["pos_embed"].float(), isqrt(expected["pos_embed"].shape[1])
    count = before_1PC.shape[1]
    # A square plus one: the class token has a position. Here it has none, as in DeiT-III, and the sum is the same.
    if isqrt(count) ** 2 != count and "cls_token" in tensors and isqrt(count - 1) ** 2 == count - 1:
        tensors["cls_token"] = tensors["cls_token"].float() + before_1PC[:, :1]
        before_1PC, count = before_1PC[:, 1:], count - 1
        lines.append("pos_embed: the class token has a position there, which was added to cls_token")
    side = isqrt(count)
    if side**2 != count or now**2 != expected["pos_embed"].shape[1]:
        raise DataError(
            f"pos_embed has {count} positions, which do not form a square of patches; start from other weights"
        )
    if side != now:
        before_1PC = resample_abs_pos_embed(before_1PC, [now, now], [side, side], num_prefix_tokens=0)
        lines.append(f"pos_embed: resized from {side} x {side} patches to {now} x {now}")
    tensors["pos_embed"] = before_1PC
