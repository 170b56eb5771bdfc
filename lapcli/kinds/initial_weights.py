"""A run that starts from given weights: `train.init_from`. Only the weights are loaded; the rest of the run is new.

`pinned` adds the sha256 of the weights to the recipe, which identifies them. `InitialWeights.load` loads them into the
model and reports the differences: head plan, model, data, and tensors that were resized, newly initialised, missing or
unused. A run that has a checkpoint is resumed from that, and the source is not read again.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from lapcli.data.text.tokenizer import Tokenizer
from lapcli.kinds.weight_sources import WeightSource, find_source
from lapcli.models.dino_vit import StudentTeacher
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.schema import BaseRecipe, GPTRecipe, InitFrom
from lapcli.runs import INFO, TOKENIZER, Run, read_run
from lapcli.runtime.errors import DataError, UsageError
from lapcli.training import checkpoint
from lapcli.training.checkpoint import check_tensors

Recipe = TypeVar("Recipe", bound=BaseRecipe)
REMEDY = "change the recipe's model, or start from other weights"
_SHOWN = 6  # names in a line
_NETWORKS, _BACKBONES = ("student.", "teacher."), ("student.backbone.", "teacher.backbone.")
_PATCHES = "patch_embed.proj.weight"
_LAYER_SCALE = re.compile(r"\.(ls[12]\.gamma|gamma_[12])$")
_CLASSIFIER = ("head.weight", "head.bias")


def pinned(recipe: Recipe, path: Path, fresh: bool = False) -> Recipe:
    """Return the recipe with the sha256 of the weights that its run at `path` starts from; an existing run has it."""
    init_from = recipe.train.init_from
    if init_from is None:
        return recipe
    known = None if fresh else _known(init_from, path)
    sha256 = known or find_source(init_from, path.parent).sha256
    if init_from.sha256 not in (None, sha256):
        raise DataError(
            f"train.init_from: {init_from.source} has the sha256 {sha256[:16]}, the recipe says "
            f"{str(init_from.sha256)[:16]}; restore those weights, or remove the sha256 from the recipe"
        )
    pinned_section = init_from.model_copy(update={"sha256": sha256})
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"init_from": pinned_section})})


def _known(given: InitFrom, path: Path) -> str | None:
    """Return the sha256 that a run at that place started from, if it was the same source."""
    if (path / INFO).is_file():
        with contextlib.suppress(UsageError):  # opening the run will report what is wrong with it
            before = read_run(path).recipe.train.init_from
            if before is not None and (before.source, before.weights) == (given.source, given.weights):
                return before.sha256
    return None


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from; `source` is None if the run has a checkpoint to resume from."""

    run: Run
    given: InitFrom
    source: WeightSource | None

    def tokenizer(self, recipe: GPTRecipe) -> Tokenizer:
        """Return the tokenizer that the weights were trained with; its vocabulary has to be the recipe's."""
        saved = self.run.path / TOKENIZER
        if "tokenizer_sha256" in self.run.info and saved.is_file():
            tokenizer = Tokenizer.from_file(saved)
            self.run.check_tokenizer(tokenizer.sha256)
            return tokenizer
        return source_tokenizer(self.source or find_source(self.given, self.run.path.parent), recipe)

    def load(self, model: nn.Module, recipe: BaseRecipe) -> tuple[dict[str, Any], list[str]]:
        """Load the weights into the model; return facts for `run.json` and lines for the log."""
        if self.source is None:
            return {"started_from": self.run.info.get("started_from")}, []
        fit = fit_weights(self.source, model)
        lines = [*_changes(self.source, recipe), *fit.lines()]
        head = f"starts from {self.source.shown}, weights sha256 {self.source.sha256[:16]}: {fit.used} tensors"
        record = {"source": self.given.source, "weights_sha256": self.source.sha256, "changed": lines}
        return {"started_from": record}, [head, *(f"  {line}" for line in lines)]


def find_initial_weights(recipe: BaseRecipe, run: Run) -> InitialWeights | None:
    """Find the weights that a run of the recipe starts from; None if they are initialised at random."""
    given = recipe.train.init_from
    if given is None:
        return None
    # Silent about damaged checkpoints: the loop reports them when it resumes.
    if checkpoint.newest(run.checkpoints, warn=lambda text: None) is not None:
        return InitialWeights(run, given, None)
    source = find_source(given, run.path.parent)
    if source.sha256 != given.sha256:
        raise DataError(
            f"train.init_from: {given.source} has other weights than when {run.path} was started (sha256 "
            f"{source.sha256[:16]} now, {str(given.sha256)[:16]} then); restore them, or use --fresh"
        )
    return InitialWeights(run, given, source)


def source_tokenizer(source: WeightSource, recipe: GPTRecipe) -> Tokenizer:
    named = recipe.tokenizer.file
    if source.tokenizer is None and named is None:
        raise UsageError(
            f"{source.file} comes without a tokenizer, which a GPT needs; start from other weights, or name their "
            "tokenizer with --set tokenizer.file=FILE"
        )
    from_source = None if source.tokenizer is None else source.tokenizer()
    named_tokenizer = None if named is None else Tokenizer.from_file(Path(named).expanduser())
    if from_source is not None and named_tokenizer is not None and from_source.sha256 != named_tokenizer.sha256:
        raise UsageError(f"tokenizer.file: {named} is not the tokenizer of {source.shown}; remove it from the recipe")
    tokenizer = from_source or named_tokenizer
    assert tokenizer is not None
    if tokenizer.vocab_size != recipe.tokenizer.vocab:
        raise UsageError(
            f"the tokenizer of {source.shown} has {tokenizer.vocab_size:,} tokens, tokenizer.vocab is "
            f"{recipe.tokenizer.vocab:,}; use --set tokenizer.vocab={tokenizer.vocab_size}"
        )
    return tokenizer


def _changes(source: WeightSource, recipe: Any) -> list[str]:
    """Describe the settings that differ between the recipe and the training of the weights."""
    plan, values, lines = recipe.model.head_plan(), recipe_to_dict(recipe), []
    if source.plan != plan:
        each = "" if len(source.plan.per_layer) != len(plan.per_layer) else f" ({source.plan} there, {plan} here)"
        lines.append(f"head plan: {source.plan.total} Laplacian heads there, {plan.total} here{each}")
    for section, known in (("model", source.model), ("data", source.data)):
        current = values.get(section) or {}
        for key, before in known.items():
            if key in current and key != "laplacian_heads" and before != current[key]:
                lines.append(f"{section}.{key}: {_short(before)} there, {_short(current[key])} here")
    return lines


@dataclass
class Fit:
    """The tensors of a source that were loaded, adapted or unused, and those of the model that were missing."""

    used: int = 0
    adapted: list[str] = field(default_factory=list)  # sentences
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        named = (("not in the source, newly initialised", self.missing), ("in the source, not used", self.unused))
        return [*self.adapted, *(f"{words}: {_listed(names)}" for words, names in named if names)]


def fit_weights(source: WeightSource, model: nn.Module) -> Fit:
    """Load the tensors that fit; DataError for a shape that cannot be resized, or if no name is in common."""
    expected, tensors, fit = model.state_dict(), source.read(), Fit()
    is_pair = any(name.startswith(_NETWORKS) for name in tensors)  # of student and teacher
    targets = {name: name for name in expected}  # name in the model: name in the source
    if isinstance(model, StudentTeacher) and not is_pair:  # a backbone is loaded into both
        targets = {name: name.split(".", 2)[2] for name in expected if name.startswith(_BACKBONES)}
    elif is_pair and not isinstance(model, StudentTeacher):  # only the teacher's backbone is loaded
        tensors = {name.removeprefix(_BACKBONES[1]): tensor for name, tensor in tensors.items()}
    wanted = {name: expected[target] for target, name in targets.items()}
    redrawn = _adapt_vit(tensors, wanted, fit) if _PATCHES in wanted else []
    loaded = {target: tensors[name] for target, name in targets.items() if name in tensors and name not in redrawn}
    if not loaded:
        first, expected_first = next(iter(tensors), "nothing"), next(iter(expected))
        raise DataError(
            f"{source.file} has no tensor of the model (it has {first}, the model {expected_first}); "
            "start from other weights"
        )
    fit.used = len(loaded)
    fit.unused = [name for name in tensors if name not in targets.values()]
    fit.missing = [name for name in expected if name not in loaded and targets.get(name) not in redrawn]
    check_tensors(source.file, loaded, {target: expected[target] for target in loaded}, REMEDY)
    model.load_state_dict(loaded, strict=False)  # `fit.missing` has named what is not loaded
    return fit


def _adapt_vit(tensors: dict[str, Tensor], expected: Mapping[str, Tensor], fit: Fit) -> list[str]:
    """Adapt the tensors of a ViT to another image, patch or block; return the names that keep their random values.

    `expected` has the model's tensors under the source's names.
    """
    from timm.layers import resample_patch_embed

    _rename_layer_scale(tensors, expected)
    _resize_positions(tensors, expected, fit)
    if _PATCHES in tensors and tensors[_PATCHES].shape[:2] == expected[_PATCHES].shape[:2]:
        before, now = list(tensors[_PATCHES].shape[2:]), list(expected[_PATCHES].shape[2:])
        if before != now:
            tensors[_PATCHES] = resample_patch_embed(tensors[_PATCHES].float(), now)
            fit.adapted.append(f"{_PATCHES}: resized from {before[0]} x {before[1]} pixels to {now[0]} x {now[1]}")
    scales = [name for name in expected if _LAYER_SCALE.search(name)]
    if any(_LAYER_SCALE.search(name) for name in tensors):
        if not scales:
            raise UsageError(
                "the weights were trained with LayerScale, and model.layer_scale is null: set it, such as with "
                "--set model.layer_scale=1e-4"
            )
    elif scales and "blocks.0.norm1.weight" in tensors:
        tensors |= {name: expected[name].new_ones(expected[name].shape) for name in scales}
        fit.adapted.append(f"LayerScale: the source has none, so it starts at 1 ({len(scales)} tensors)")
    classifier = [name for name in _CLASSIFIER if name in tensors and name in expected]
    redrawn = [name for name in classifier if len(tensors[name]) != len(expected[name])]
    if redrawn:
        before_K, now_K = len(tensors[redrawn[0]]), len(expected[redrawn[0]])
        fit.adapted.append(f"{', '.join(redrawn)}: newly initialised, {before_K:,} classes there, {now_K:,} here")
    return redrawn


def _rename_layer_scale(tensors: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Rename LayerScale: `gamma_1` in self-supervised models and timm's EVA is `ls1.gamma` in its plain ViTs."""
    for name in list(tensors):
        for theirs, ours in ((r"\.gamma_([12])$", r".ls\1.gamma"), (r"\.ls([12])\.gamma$", r".gamma_\1")):
            renamed = re.sub(theirs, ours, name)
            if renamed != name and name not in expected and renamed in expected:
                tensors[renamed] = tensors.pop(name)


def _resize_positions(tensors: dict[str, Tensor], expected: Mapping[str, Tensor], fit: Fit) -> None:
    """Resize the positions of the patches to the model's; that of the class token is added to the class token itself.

    Shapes: P positions, C channels.
    """
    if "pos_embed" not in tensors or "pos_embed" not in expected:
        return
    from timm.layers import resample_abs_pos_embed

    before_1PC, now = tensors["pos_embed"].float(), isqrt(expected["pos_embed"].shape[1])
    count = before_1PC.shape[1]
    # A square plus one: the class token has a position. Here it has none, as in DeiT-III, and the sum is the same.
    if isqrt(count) ** 2 != count and "cls_token" in tensors and isqrt(count - 1) ** 2 == count - 1:
        tensors["cls_token"] = tensors["cls_token"].float() + before_1PC[:, :1]
        before_1PC, count = before_1PC[:, 1:], count - 1
        fit.adapted.append("pos_embed: the class token has a position there, which was added to cls_token")
    side = isqrt(count)
    if side**2 != count or now**2 != expected["pos_embed"].shape[1]:
        raise DataError(
            f"pos_embed has {count} positions, which do not form a square of patches; start from other weights"
        )
    if side != now:
        before_1PC = resample_abs_pos_embed(before_1PC, [now, now], [side, side], num_prefix_tokens=0)
        fit.adapted.append(f"pos_embed: resized from {side} x {side} patches to {now} x {now}")
    tensors["pos_embed"] = before_1PC


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
