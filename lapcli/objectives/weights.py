"""Weights by name: the checkpoints of runs, stock ViTs of timm, and runs that start from either (`train.init_from`).

    run:NAME[@step|best]     a run, finished or not; without a suffix its last checkpoint, as for the run's FOLDER
    timm:NAME                a stock ViT with its pretrained weights, or those of a file

Mismatched weights are refused, never loaded partially. Only safetensors, JSON and pickles of tensors are read,
so no code is executed. A run that starts from weights stores their sha256 in its recipe, which identifies them. Only
the weights are loaded; the rest of the run is new. A run that has a checkpoint resumes from that.
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import isqrt
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from huggingface_hub import hf_hub_download
from timm.data import resolve_model_data_config
from timm.layers import resample_abs_pos_embed
from timm.models import clean_state_dict, eva, load_state_dict, vision_transformer
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lapcli import checkpoint as checkpoints
from lapcli.checkpoint import Checkpoint, check_tensors, read_metadata, read_tensors
from lapcli.data.text.tokenizer import Tokenizer
from lapcli.heads.plan import HeadPlan, head_plan
from lapcli.objectives import objective_of
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe import recipe_to_dict
from lapcli.recipe.chat import ChatStageRecipe
from lapcli.recipe.schema import (
    CLASSES,
    FEATURES,
    RUN,
    TIMM,
    UNKNOWN,
    BaseRecipe,
    GPTRecipe,
    InitFrom,
    Source,
    TextSource,
)
from lapcli.recipe.vision import ImageFiles
from lapcli.runs import (
    INFO,
    SOURCES_OF_WEIGHTS,
    TOKENIZER,
    TRAIN_AGAIN,
    Run,
    check_start,
    named_run,
    read_run,
    read_summary,
)
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file
from lapcli.runtime.ranks import pick_device

Recipe = TypeVar("Recipe", bound=BaseRecipe)
REMEDY = "change the recipe's model, or start from other weights"
_ANOTHER_FILE = "give another file with --set train.init_from.weights=FILE"
_FROM_A_FILE = "start a run from a file with `lap train --init-from timm:NAME --set train.init_from.weights=FILE`"
_LAYER_SCALE = re.compile(r"\.ls[12]\.gamma$")


def find_checkpoint(run: Run, which: str | int) -> Checkpoint:
    """Find the checkpoint `last`, `best` or a step number, and verify its hashes."""
    which = str(which)
    steps = checkpoints.steps_in(run.checkpoints)
    if not steps and run.is_finished:
        raise DataError(f"{run.checkpoints} has no checkpoint any more; restore it from a backup, or {TRAIN_AGAIN}")
    if not steps:
        raise UsageError(f"{run.path} has no checkpoint yet; train it first")
    step: Any = steps[-1] if which == "last" else int(which) if which.isdecimal() else None
    if which == "best" and (step := read_summary(run).get("best_step")) is None:
        raise UsageError(f"{run.path} has no best checkpoint (it is unfinished, or its objective keeps none); use last")
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise UsageError(f"{run.path} has no checkpoint {which[:40]!r}; there are last, best and the kept steps {kept}")
    checkpoint = checkpoints.read(run.checkpoints / f"step-{step:06d}")
    final = run.info.get("weights_sha256") if run.is_finished and which == "last" else None
    if final not in (None, checkpoint.weights_sha256):
        raise DataError(
            f"{checkpoint.path} is not the checkpoint that the run ended with (step {run.info.get('step')}, weights "
            f"sha256 {final[:16]}); restore that one from a backup, or choose --checkpoint {step}"
        )
    return checkpoint


def open_run(
    run: Run, checkpoint: Checkpoint | None, device: torch.device | None = None, *, float32: bool = False
) -> LoadedModel:
    """Load the run's model with the weights of that checkpoint, or untrained without one; by default on its device."""
    device = device or torch.device(pick_device(run.recipe.train.device))
    return objective_of(run.recipe).load(run, checkpoint, device, float32=float32)


def check_timm_name(name: str) -> str:
    """Return timm's name for the model; UsageError with the nearest name if there is none."""
    known = name.removeprefix(TIMM)
    if not name.startswith(TIMM) or not known:
        raise UsageError(f"a stock model is named timm:NAME, such as timm:vit_small_patch16_224, got {name[:80]!r}")
    if not timm.is_model(known):
        near = get_close_matches(known, timm.list_models(["*vit*", "eva*"]), 1, cutoff=0.4)
        raise UsageError(f"timm has no model {known[:80]!r}{f'; did you mean timm:{near[0]}?' if near else ''}")
    return known


def open_timm(name: str, device: torch.device, seed: int | None = None) -> LoadedModel:
    """Load a stock timm ViT: with its pretrained weights, or untrained with a seed."""
    model = _build_timm(name, seed or 0)
    path = None
    if seed is None:
        path = _timm_file(name, model, None)
        tensors, wanted = _read_timm(model, path), model.state_dict()
        tensors = {key: value for key, value in tensors.items() if key in wanted or key != "mask_token"}
        check_tensors(path, tensors, wanted, _ANOTHER_FILE)
        model.load_state_dict(tensors)
    config = resolve_model_data_config(model)
    source = ImageFiles(
        train="hub:ILSVRC/imagenet-1k",  # what timm's weights were trained on
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        crop_ratio=float(config["crop_pct"]),
        mean=list(config["mean"]),
        std=list(config["std"]),
    )
    return LoadedModel(
        name=name,
        module=model.to(device),
        gives=frozenset({CLASSES, FEATURES}),
        weights_sha256=None if path is None else sha256_of_file(path),
        step=None,
        device=device,
        images=source,
        image_size=int(config["input_size"][-1]),
    )


def _build_timm(name: str, seed: int = 0) -> Any:
    known = check_timm_name(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = timm.create_model(known, pretrained=False)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"timm cannot build {known} ({str(error).splitlines()[0][:200]})") from None
    if not isinstance(model, VisionTransformer | Eva):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which cannot be measured; choose a plain ViT, timm's "
            "VisionTransformer or Eva"
        )
    return model


def _timm_file(name: str, model: Any, weights: Path | None) -> Path:
    """Return the file with the model's weights: the given one, or the hub's."""
    if weights is not None:
        if not weights.is_file():
            raise UsageError(f"there is no file {weights}; train.init_from.weights takes a .safetensors or .pth file")
        return weights
    settings, offline = model.pretrained_cfg, hub_is_offline()
    repository, _, revision = str(settings.get("hf_hub_id") or "").partition("@")
    if not repository:
        raise UsageError(f"the hub has no weights for {name}; {_FROM_A_FILE}")
    file = settings.get("hf_hub_filename") or "model.safetensors"
    try:
        return Path(hf_hub_download(repository, file, revision=revision or None, local_files_only=offline))
    except Exception as error:  # the connection, proxies and the library's transports raise many kinds
        why = "HF_HUB_OFFLINE is set and they are not on this machine" if offline else str(error).splitlines()[0]
        raise DataError(
            f"the weights of {name} cannot be loaded from {repository} on the hub ({why[:200]}); run this where the "
            f"hub can be reached, or {_FROM_A_FILE}"
        ) from None


def _read_timm(model: Any, path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file under timm's names for that model, whether they fit or not."""
    adapt = eva.checkpoint_filter_fn if isinstance(model, Eva) else vision_transformer.checkpoint_filter_fn
    if path.suffix == ".safetensors":
        plan = read_metadata(path, _ANOTHER_FILE).get("laplacian_heads")
        # `0` and `[0, 0]` are plain; every other plan has a number of heads.
        if plan is not None and any(digit in "123456789" for digit in plan):
            # They would load into a stock ViT but compute nonsense.
            raise DataError(f"{path} has laplacian_heads {plan}, a stock ViT has none; start with --init-from run:NAME")
        state = clean_state_dict(read_tensors(path, _ANOTHER_FILE))
    else:
        try:
            state = load_state_dict(str(path), device="cpu", weights_only=True)  # nothing in it is executed
        except Exception:  # of pickle, zip or torch, whose messages do not help here
            raise DataError(f"{path} is not a file of tensors that torch can read; {_ANOTHER_FILE}") from None
    try:
        return adapt(state, model)
    except Exception as error:  # timm's conversions raise many kinds
        raise DataError(
            f"{path} cannot be loaded into {type(model).__name__} ({str(error)[:200]}); {_ANOTHER_FILE}"
        ) from None


@dataclass(frozen=True)
class Weights:
    """Weights to start from, by the name of their source; `read` loads them."""

    shown: str  # for people
    file: Path
    sha256: str  # of the file
    read: Callable[[], dict[str, Tensor]] = field(repr=False)
    plan: HeadPlan
    model: Mapping[str, Any]  # what is known about the recipe's `model`
    tokenizer_run: Run | None = None  # of a GPT: the run that has the tokenizer

    def tokenizer(self) -> Tokenizer:
        if self.tokenizer_run is None:
            raise UsageError(f"{self.shown} is not a GPT with its tokenizer; start from another run")
        return tokenizer_of(self.tokenizer_run)


def tokenizer_of(run: Run) -> Tokenizer:
    tokenizer = Tokenizer.from_file(run.path / TOKENIZER)
    run.check_tokenizer(tokenizer.sha256)
    return tokenizer


def open_weights(given: InitFrom, runs_dir: Path) -> Weights:
    """Find a source; UsageError or DataError with the next step if it is missing, incomplete or unrecognised."""
    source = given.source
    check_start(source, runs_dir)
    if source.startswith(TIMM):
        stock: Any = _build_timm(source)
        file = _timm_file(source, stock, None if given.weights is None else Path(given.weights).expanduser())
        heads, patches = int(stock.blocks[0].attn.num_heads), stock.patch_embed
        shape = {"layers": len(stock.blocks), "width": int(stock.embed_dim), "heads": heads}
        return Weights(
            shown=f"{source}, {file.name}",
            file=file,
            sha256=sha256_of_file(file),
            read=lambda: _read_timm(stock, file),
            plan=head_plan(0, len(stock.blocks), heads),
            model={**shape, "image": int(patches.img_size[0]), "patch": int(patches.patch_size[0])},
        )
    folder, which = Path(source).expanduser(), "last"
    if source.startswith(RUN):
        name, _, which = source.removeprefix(RUN).partition("@")
        run = named_run(runs_dir, name)
    elif (folder / INFO).is_file():
        run = named_run(runs_dir, str(folder))
    else:
        raise UsageError(f"{folder} has no weights that lap can read; {SOURCES_OF_WEIGHTS}")
    checkpoint = find_checkpoint(run, which or "last")
    return Weights(
        shown=f"{run.path}, step {checkpoint.step}",
        file=checkpoint.weights,
        sha256=checkpoint.weights_sha256,
        read=lambda: read_tensors(checkpoint.weights),
        plan=run.recipe.model.head_plan(),  # type: ignore[attr-defined]
        model=recipe_to_dict(run.recipe)["model"],
        tokenizer_run=run if (run.path / TOKENIZER).is_file() else None,
    )


def source_run(run: Run) -> Run | None:
    """Return the run that provided a run's initial weights; None if they came from elsewhere."""
    given = run.recipe.train.init_from
    if given is None:
        return None
    if given.source.startswith(RUN):
        return named_run(run.path.parent, given.source.removeprefix(RUN).partition("@")[0])
    path = Path(given.source).expanduser()
    return read_run(path) if (path / INFO).is_file() else None


def text_of(run: Run) -> tuple[Run, Source]:
    """Return a GPT's pretraining text, on which a chat stage is also measured, and the run that has it."""
    if not isinstance(run.recipe, ChatStageRecipe):
        return run, run.recipe.data  # type: ignore[attr-defined]
    before = source_run(run)
    return (run, TextSource(train=UNKNOWN)) if before is None else text_of(before)


def with_sha256(recipe: Recipe, path: Path, fresh: bool = False) -> Recipe:
    """Return the recipe with the sha256 of the initial weights of its run at `path`."""
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


def initial_weights(recipe: BaseRecipe, run: Run) -> Weights | None:
    """Find the weights that a run starts from; None if they are random, or if it has a checkpoint to resume from."""
    given = recipe.train.init_from
    # Silent about damaged checkpoints: the loop reports them when it resumes.
    if given is None or checkpoints.newest(run.checkpoints, warn=lambda text: None) is not None:
        return None
    source = open_weights(given, run.path.parent)
    if source.sha256 != given.sha256:
        raise DataError(
            f"train.init_from: {given.source} is not what {run.path} started from (sha256 "
            f"{source.sha256[:16]}, not {str(given.sha256)[:16]}); restore them, or use --fresh"
        )
    return source


def inherited_tokenizer(recipe: GPTRecipe, run: Run | None, initial: Weights | None) -> Tokenizer | None:
    """Return the tokenizer of a run's initial weights; None if they are random."""
    if recipe.train.init_from is None:
        return None
    if initial is not None:
        tokenizer = initial.tokenizer()
    else:
        assert run is not None
        tokenizer = tokenizer_of(run)
    if tokenizer.vocab_size != recipe.tokenizer.vocab:
        raise UsageError(
            f"the tokenizer of {recipe.train.init_from.source} has {tokenizer.vocab_size:,} tokens, tokenizer.vocab is "
            f"{recipe.tokenizer.vocab:,}; use --set tokenizer.vocab={tokenizer.vocab_size}"
        )
    return tokenizer


def load_initial(source: Weights, model: nn.Module, recipe: BaseRecipe) -> list[str]:
    """Load the weights into a run's model; return lines for the log, among them what differs from the source."""
    plan: HeadPlan = recipe.model.head_plan()  # type: ignore[attr-defined]
    current, lines = recipe_to_dict(recipe)["model"], []
    if source.plan != plan:
        each = "" if len(source.plan.per_layer) != len(plan.per_layer) else f" ({source.plan} there, {plan} here)"
        lines.append(f"head plan: {source.plan.total} Laplacian heads there, {plan.total} here{each}")
    for key, before in source.model.items():
        if key in current and key not in ("laplacian_heads", "operators") and before != current[key]:
            lines.append(f"model.{key}: {before} there, {current[key]} here")
    lines += fit_weights(source, model)
    head = f"starts from {source.shown}, weights sha256 {source.sha256[:16]}"
    return [head, *(f"  {line}" for line in lines)]


def fit_weights(source: Weights, model: nn.Module) -> list[str]:
    """Load the matching tensors and return which were resized, newly initialised or not used.

    DataError for a shape that cannot be resized, or if no name is in common.
    """
    expected, tensors, lines = model.state_dict(), source.read(), list[str]()
    redrawn = _adapt_vit(tensors, expected, lines) if "patch_embed.proj.weight" in expected else []
    loaded = {name: tensors[name] for name in expected if name in tensors and name not in redrawn}
    if not loaded:
        first, expected_first = next(iter(tensors), "nothing"), next(iter(expected))
        raise DataError(
            f"no tensor name in {source.file} matches the model (file: {first}, model: {expected_first}); "
            "start from other weights"
        )
    check_tensors(source.file, loaded, {name: expected[name] for name in loaded}, REMEDY)
    model.load_state_dict(loaded, strict=False)  # what is not loaded is named in the result
    if missing := [name for name in expected if name not in loaded and name not in redrawn]:
        lines.append(f"not in the source, newly initialised: {listed(missing)}")
    if unused := [name for name in tensors if name not in expected]:
        lines.append(f"in the source, not used: {listed(unused)}")
    return lines


def listed(names: list[str], shown: int = 8) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(name[:80] for name in names[:shown]) + more


def _adapt_vit(tensors: dict[str, Tensor], expected: Mapping[str, Tensor], lines: list[str]) -> list[str]:
    """Adapt the tensors of a ViT to another image or block; return the names that keep their random values.

    Positions of the patches are resized; that of the class token is added to the class token itself. Shapes: P
    positions, C channels.
    """
    if "pos_embed" in tensors and "pos_embed" in expected:
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
    classifier: list[str] = [name for name in ("head.weight", "head.bias") if name in tensors and name in expected]
    redrawn = [name for name in classifier if len(tensors[name]) != len(expected[name])]
    if redrawn:
        before_K, now_K = len(tensors[redrawn[0]]), len(expected[redrawn[0]])
        lines.append(f"{', '.join(redrawn)}: newly initialised, {before_K:,} classes there, {now_K:,} here")
    return redrawn
