"""A stock timm ViT to compare with: `--model timm:NAME`, its weights from the hub or from a file.

Weights that do not fit are refused, not loaded in part: timm itself only logs what is missing.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lapcli.evaluation.backbones import TimmBackbone
from lapcli.runtime.environment import hub_is_offline
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.files import sha256_of_file
from lapcli.training.tensors import check_tensors, read_tensors

PREFIX = "timm:"
SAFE = "model.safetensors"
REMEDY = "give another file with --weights"


class StockModel(NamedTuple):
    backbone: TimmBackbone
    weights: Path
    weights_sha256: str


def open_stock_model(name: str, weights: Path | None, device: torch.device) -> StockModel:
    import timm

    known = name.removeprefix(PREFIX)
    if not name.startswith(PREFIX) or not known:
        raise UsageError(f"--model takes timm:NAME, such as timm:vit_small_patch16_224, got {name[:80]!r}")
    if not timm.is_model(known):
        near = get_close_matches(known, timm.list_models(["*vit*", "eva*"]), 1, cutoff=0.4)
        raise UsageError(f"timm has no model {known[:80]!r}{f'; did you mean timm:{near[0]}?' if near else ''}")
    try:
        model: Any = timm.create_model(known, pretrained=False, num_classes=0)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"timm cannot build {known} ({str(error).splitlines()[0][:200]})") from None
    settings = model.pretrained_cfg
    backbone = TimmBackbone(model, name=name, mean=settings["mean"], std=settings["std"], device=device)
    path = weights if weights is not None else _hub_weights(known, settings)
    _load(model, path)
    backbone.model.eval().requires_grad_(False)
    return StockModel(backbone, path, sha256_of_file(path))


def _load(model: Any, path: Path) -> None:
    from timm.models import clean_state_dict, eva, load_state_dict, vision_transformer

    if not path.is_file():
        raise UsageError(f"there is no file {path}; --weights takes a .safetensors or .pth file of the model")
    adapt = eva.checkpoint_filter_fn if isinstance(model, eva.Eva) else vision_transformer.checkpoint_filter_fn
    try:
        if path.suffix == ".safetensors":
            metadata, tensors = read_tensors(path, REMEDY)
            _refuse_laplacian(path, metadata)
            state = clean_state_dict(tensors)
        else:
            state = load_state_dict(str(path), device="cpu")  # tensors alone: nothing in the file is executed
        found = adapt(state, model)
    except DataError:
        raise
    except Exception as error:  # whatever pickle or timm's conversions raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{path} cannot be loaded into {type(model).__name__} ({reason[:200]}); {REMEDY}") from None
    spare = [key for key in found if key.startswith(("head", "fc_norm", "norm.", "mask_token"))]  # of other tasks
    wanted = model.state_dict()
    fitting = {key: value for key, value in found.items() if key in wanted or key not in spare}
    check_tensors(path, fitting, wanted, REMEDY)
    model.load_state_dict(fitting)


def _refuse_laplacian(path: Path, metadata: dict[str, str]) -> None:
    """Weights of a run with Laplacian heads would fit a stock ViT, wrongly."""
    plan = metadata.get("laplacian_heads")
    if plan is not None and any(digit in "123456789" for digit in plan):
        raise DataError(f"{path} was trained with laplacian_heads {plan}, a stock ViT has none; use --run for its run")


def _hub_weights(name: str, settings: dict[str, Any]) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository = settings.get("hf_hub_id")
    if not repository:
        raise UsageError(f"the hub has no weights for {name}; give a file with --weights")
    repository, _, revision = str(repository).partition("@")
    files = [settings["hf_hub_filename"]] if settings.get("hf_hub_filename") else [SAFE, "pytorch_model.bin"]
    try:
        for number, file in enumerate(files):
            try:
                return Path(
                    hf_hub_download(repository, file, revision=revision or None, local_files_only=hub_is_offline())
                )
            except EntryNotFoundError:
                if number + 1 == len(files):
                    raise
    except Exception as error:  # whatever the connection, its proxies or the library's transports raise
        why = (
            "HF_HUB_OFFLINE is set and they are not on this machine" if hub_is_offline() else str(error).splitlines()[0]
        )
        raise DataError(
            f"the weights of {name} could not be had from {repository} on the hub ({why[:200]}); run this where the "
            "hub can be reached, or give a file with --weights"
        ) from None
    raise AssertionError("not reached")
