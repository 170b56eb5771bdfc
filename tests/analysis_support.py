"""Tiny models for the tests of the analyses, with all weights random: zero-initialised outputs would hide the heads."""

from types import SimpleNamespace
from typing import Any

import timm
import torch

import lapcli
from lapcli.analysis.measurement import Settings
from lapcli.measures.capture import Batch, Capture, anatomy_of
from lapcli.models.gpt import GPT, GPTConfig


def gpt(laplacian_heads, kv_heads=None, operators=None):
    torch.manual_seed(0)
    config = GPTConfig(
        layers=2,
        heads=4,
        kv_heads=kv_heads,
        width=16,
        vocab=11,
        context=8,
        laplacian_heads=laplacian_heads,
        operators=operators,
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model, torch.randint(11, (2, 8))


def vit(laplacian_heads, name="deit3_base_patch16_224", **options: Any):
    torch.manual_seed(0)
    model = timm.create_model(
        name, img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, **options
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return lapcli.laplacianize(model.eval(), laplacian_heads), torch.randn(2, 3, 8, 8)


class _Feed:
    """Accepts listeners like a capture; the test feeds them directly."""

    def __init__(self):
        self.listeners = []

    def on_tokens(self, site, listener):
        self.listeners.append(listener)

    on_labelled_tokens = on_tokens


def of_tokens(kind, parts, **examples):
    """The result of a measurement over batches of tokens, or of (tokens, labels, first)."""
    anatomy = SimpleNamespace(layers=1, width=parts[0][0].shape[-1])
    opened = SimpleNamespace(anatomy=anatomy, examples=SimpleNamespace(**examples))
    feed = _Feed()
    result = kind(opened, Settings()).measure(feed, 0)
    for part in parts:
        for listener in feed.listeners:
            listener(*part) if isinstance(part, tuple) else listener(part, None)
    return result()


def measured(kind, model, inputs):
    """A measurement's results in each layer of a model, one input at a time."""
    anatomy = anatomy_of(model)
    measurement, capture = (
        kind(SimpleNamespace(anatomy=anatomy, plan=anatomy.plan), Settings(layer="all")),
        Capture(anatomy),
    )
    results = [measurement.measure(capture, layer) for layer in measurement.layers]
    capture.run([Batch(inputs[place : place + 1], None, place) for place in range(len(inputs))])
    return [result() for result in results]


class WithoutFloat64(torch.Tensor):
    """Imitates a tensor on an Apple GPU: results stay there too, and float64 is refused before `cpu()`.

    Its device is still the CPU, so `has_float64` has to be patched.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu:
            return result.as_subclass(torch.Tensor)
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return result


def on_a_device_without_float64(model, monkeypatch):
    """Move a model's parameters there, in place."""
    monkeypatch.setattr("lapcli.measures.tokens.has_float64", lambda device: False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().as_subclass(WithoutFloat64)))
    return model


def dino(laplacian_heads, operators=None):
    from lapcli.models.dino_vit import DinoViT
    from lapcli.recipe.dino import DinoModel

    torch.manual_seed(0)
    model = DinoViT(
        DinoModel(layers=2, width=16, heads=4, patch=4, laplacian_heads=laplacian_heads, operators=operators)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval(), torch.randn(2, 3, 8, 12)


TINY_SELF_SUPERVISED: dict[str, Any] = {
    "objective": "self_supervised",
    "model": {
        "layers": 2,
        "width": 32,
        "heads": 4,
        "patch": 4,
        "laplacian_heads": 2,
        "layer_scale": 0.5,
        "head": {"hidden": 16, "bottleneck": 8, "dino_prototypes": 16, "ibot_prototypes": 16},
    },
    "data": {"train": "builtin:photographs", "crops": {"global_size": 16, "locals": 2, "local_size": 8}},
    "train": {"steps": 4, "batch": 8, "micro_batch": 8, "group": 8, "threads": 1},
    "optimizer": {"lr": 1e-3},
    "schedule": {"epoch_steps": 1, "warmup_epochs": 1, "teacher_warmup_epochs": 2},
    "validation": {"every": 2, "neighbours": 5, "images": 30, "batch": 50},
    "checkpoint": {"every": 4, "keep": 1},
}


def self_supervised_recipe(**sections: Any):
    """A tiny self-supervised recipe with some keys of some sections replaced."""
    from lapcli.recipe import recipe_from_dict

    given = {
        name: {**value, **sections.get(name, {})} if isinstance(value, dict) else value
        for name, value in TINY_SELF_SUPERVISED.items()
    }
    return recipe_from_dict(given)
