"""Opens a model by name: a run, one of its checkpoints, or `timm:NAME` with its own or a file's weights.

Weights that do not fit are refused, never loaded partially.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from timm.data import resolve_model_data_config
from timm.models import clean_state_dict, eva, load_state_dict, vision_transformer
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from lapcli import checkpoint as checkpoints
from lapcli.checkpoint import Checkpoint, check_tensors, read_metadata, read_tensors
from lapcli.objectives import objective_of
from lapcli.objectives.objective import LoadedModel
from lapcli.recipe.schema import CLASSES, FEATURES, TIMM
from lapcli.recipe.vision import ImageFiles
from lapcli.runs import TRAIN_AGAIN, Run, read_summary
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file

SAFE = "model.safetensors"
REMEDY = "give another file with --set train.init_from.weights=FILE"
FROM_A_FILE = "start a run from a file with `lap train --init-from timm:NAME --set train.init_from.weights=FILE`"
STOCK_IMAGES = "hub:ILSVRC/imagenet-1k"  # what timm's weights were trained on


def find_checkpoint(run: Run, which: str) -> Checkpoint:
    """Find the checkpoint `last`, `best` or of a step number, and verify its hashes."""
    steps = checkpoints.steps_in(run.checkpoints)
    if not steps and run.is_finished:
        raise DataError(f"{run.checkpoints} has no checkpoint any more; restore it from a backup, or {TRAIN_AGAIN}")
    if not steps:
        raise UsageError(f"{run.path} has no checkpoint yet; train it first")
    if which == "last":
        return _last_checkpoint(run, steps[-1])
    step: Any = int(which) if which.isdecimal() else None
    if which == "best" and (step := read_summary(run).get("best_step")) is None:
        raise UsageError(f"{run.path} has no best checkpoint (unfinished, or of a kind that keeps none); use last")
    if step not in steps:
        kept = ", ".join(map(str, steps))
        raise UsageError(f"{run.path} has no checkpoint {which[:40]!r}; there are last, best and the kept steps {kept}")
    return checkpoints.read(run.checkpoints / f"step-{step:06d}")


def _last_checkpoint(run: Run, newest: int) -> Checkpoint:
    """Read the newest checkpoint; for a finished run it must be the final one."""
    checkpoint = checkpoints.read(run.checkpoints / f"step-{newest:06d}")
    if run.is_finished and run.info.get("weights_sha256") not in (None, checkpoint.weights_sha256):
        raise DataError(
            f"{checkpoint.path} is not the checkpoint that the run ended with (step {run.info.get('step')}, weights "
            f"sha256 {str(run.info['weights_sha256'])[:16]}); restore that one from a backup, or choose "
            f"--checkpoint {newest}"
        )
    return checkpoint


def open_run(run: Run, checkpoint: Checkpoint | None, device: torch.device, *, float32: bool = False) -> LoadedModel:
    """Load the run's model with the weights of that checkpoint, or untrained without one."""
    return objective_of(run.recipe).load(run, checkpoint, device, float32=float32)


def open_timm(
    name: str,
    device: torch.device,
    *,
    weights: Path | None = None,
    seed: int | None = None,
    with_classifier: bool = False,
) -> LoadedModel:
    """Load a stock timm ViT: with its weights from the hub, with those of a file, or with `seed` untrained.

    `with_classifier`: with its head; otherwise only the features, which weights of other tasks have as well.
    """
    model = build_timm(name, seed or 0, with_classifier=with_classifier)
    path = None
    if seed is None:
        path = timm_file(name, model, weights)
        _load(model, path, with_classifier)
    config = resolve_model_data_config(model)
    source = ImageFiles(
        train=STOCK_IMAGES,
        interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        crop_ratio=float(config["crop_pct"]),
        mean=list(config["mean"]),
        std=list(config["std"]),
    )
    return LoadedModel(
        name=name,
        module=model.to(device),
        gives=frozenset({CLASSES, FEATURES}) if with_classifier else frozenset({FEATURES}),
        weights="untrained" if path is None else "pretrained",
        weights_sha256=None if path is None else sha256_of_file(path),
        step=None,
        device=device,
        file=path,
        images=source,
        image_size=int(config["input_size"][-1]),
    )


def build_timm(name: str, seed: int = 0, *, with_classifier: bool = True) -> Any:
    """Build the stock ViT, untrained."""
    known = check_timm_name(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            headless: dict[str, Any] = {} if with_classifier else {"num_classes": 0}
            model = timm.create_model(known, pretrained=False, **headless)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"timm cannot build {known} ({str(error).splitlines()[0][:200]})") from None
    if not isinstance(model, VisionTransformer | Eva):
        raise UsageError(
            f"{name} is a {type(model).__name__}, which cannot be measured; choose a plain ViT, timm's "
            "VisionTransformer or Eva"
        )
    return model


def timm_file(name: str, model: Any, weights: Path | None) -> Path:
    """Return the file with the model's weights: the given one, or the hub's."""
    path = weights if weights is not None else _hub_weights(check_timm_name(name), model.pretrained_cfg)
    if not path.is_file():
        raise UsageError(f"there is no file {path}; train.init_from.weights takes a .safetensors or .pth file")
    return path


def check_timm_name(name: str) -> str:
    """Return timm's name of the model; UsageError with the nearest name if there is none."""
    known = name.removeprefix(TIMM)
    if not name.startswith(TIMM) or not known:
        raise UsageError(f"a stock model is named timm:NAME, such as timm:vit_small_patch16_224, got {name[:80]!r}")
    if not timm.is_model(known):
        near = get_close_matches(known, timm.list_models(["*vit*", "eva*"]), 1, cutoff=0.4)
        raise UsageError(f"timm has no model {known[:80]!r}{f'; did you mean timm:{near[0]}?' if near else ''}")
    return known


def read_timm(model: Any, path: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file under timm's names for that model, whether they fit or not."""
    adapt = eva.checkpoint_filter_fn if isinstance(model, eva.Eva) else vision_transformer.checkpoint_filter_fn
    try:
        if path.suffix == ".safetensors":
            _refuse_laplacian(path, read_metadata(path, REMEDY))
            state = clean_state_dict(read_tensors(path, REMEDY))
        else:
            try:
                state = load_state_dict(str(path), device="cpu", weights_only=True)  # nothing in it is executed
            except Exception:  # of pickle, zip or torch, whose messages do not help here
                raise DataError(f"{path} is not a file of tensors that torch can read; {REMEDY}") from None
        return adapt(state, model)
    except DataError:
        raise
    except Exception as error:  # timm's conversions raise many kinds
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{path} cannot be loaded into {type(model).__name__} ({reason[:200]}); {REMEDY}") from None


def _load(model: Any, path: Path, with_classifier: bool) -> None:
    converted = read_timm(model, path)
    others = ("mask_token",) if with_classifier else ("head", "fc_norm", "norm.", "mask_token")  # parts for other tasks
    spare = [key for key in converted if key.startswith(others)]
    wanted = model.state_dict()
    # Unknown tensors that belong to no other task stay in, so that `check_tensors` refuses them.
    fitting = {key: value for key, value in converted.items() if key in wanted or key not in spare}
    check_tensors(path, fitting, wanted, REMEDY)
    model.load_state_dict(fitting)


def _refuse_laplacian(path: Path, metadata: dict[str, str]) -> None:
    """Refuse weights of a run with Laplacian heads, which would load into a stock ViT but compute nonsense."""
    plan = metadata.get("laplacian_heads")
    # `0` and `[0, 0]` are plain; every other plan has a number of heads.
    if plan is not None and any(digit in "123456789" for digit in plan):
        raise DataError(f"{path} has laplacian_heads {plan}, a stock ViT has none; start with --init-from run:NAME")


def _hub_weights(name: str, settings: dict[str, Any]) -> Path:
    repository = settings.get("hf_hub_id")
    if not repository:
        raise UsageError(f"the hub has no weights for {name}; {FROM_A_FILE}")
    repository, _, revision = str(repository).partition("@")
    file, offline = settings.get("hf_hub_filename") or SAFE, hub_is_offline()
    try:
        return Path(hf_hub_download(repository, file, revision=revision or None, local_files_only=offline))
    except Exception as error:  # the connection, proxies and the library's transports raise many kinds
        why = "HF_HUB_OFFLINE is set and they are not on this machine" if offline else str(error).splitlines()[0]
        raise DataError(
            f"the weights of {name} cannot be loaded from {repository} on the hub ({why[:200]}); run this where the "
            f"hub can be reached, or {FROM_A_FILE}"
        ) from None
