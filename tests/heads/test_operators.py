"""Every head operator against its float64 matrix, in every model, and plans that name operators."""

import json
from typing import Any

import pytest
import timm
import torch
from dino_support import dino_recipe
from image_support import image_recipe
from safetensors.torch import save_file
from support import tiny_recipe, write_text
from torch import Tensor

import lapcli
from lapcli.checkpoint import load_weights
from lapcli.heads.laplacian import HeadOperators
from lapcli.heads.plan import head_plan
from lapcli.models.dino_vit import StudentTeacher
from lapcli.models.gpt import GPT, GPTConfig, KVCache
from lapcli.models.vit import build_vit
from lapcli.objectives import classification, language_model, schedules
from lapcli.runtime.errors import DataError

torch.set_num_threads(1)

#: Each form of each operator: its name and constants.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "laplacian": ("laplacian", {}),
    "mix": ("mix", {"alpha": 0.7, "beta": -1.3}),
    "learned mix": ("mix", {"learn": ["alpha", "beta"]}),
    "value-only": ("value-only", {}),
    "centered": ("centered", {}),
    "attnscale": ("attnscale", {}),
    "fixed attnscale": ("attnscale", {"strength": 0.4, "learn": []}),
    "shaped": ("shaped", {}),
    "exclusive": ("exclusive", {}),
    "gated exclusive": ("exclusive", {"gate": "tanh"}),
    "headwise gate": ("gate", {}),
    "elementwise gate": ("gate", {"form": "elementwise"}),
}
#: All operators in one model.
EVERY_LAYER: list[dict[str, Any]] = [
    {"laplacian": 1, "gate": 1, "centered": 1},
    {"mix": {"heads": 1, "learn": ["alpha"]}, "exclusive": {"heads": 1, "gate": "tanh"}, "shaped": 1},
    {"attnscale": 2, "value-only": 1, "gate": {"heads": 1, "form": "elementwise"}},
]
H, D, WIDTH = 4, 6, 24
every_case = pytest.mark.parametrize("case", CASES)


def spec_of(case: str, heads: Any = 3) -> dict[str, Any]:
    name, constants = CASES[case]
    return {name: {"heads": heads, **constants}}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(case: str) -> HeadOperators:
    """The second layer's operators; their parameters are random, since a default such as 0 could hide an error."""
    layer = HeadOperators(head_plan(spec_of(case), 2, H), 1, D, WIDTH).double()
    with torch.no_grad():
        for seed, p in enumerate(layer.parameters()):
            p.copy_(random(*p.shape, seed=50 + seed))
    return layer


def inputs(T: int, S: int, G: int) -> dict[str, Tensor]:
    sizes = {"q": (2, H, T, D), "k": (2, G, S, D), "v": (2, G, S, D), "x": (2, T, WIDTH)}
    return {name: random(*size, seed=seed).requires_grad_() for seed, (name, size) in enumerate(sizes.items())}


def run(layer: HeadOperators, q: Tensor, k: Tensor, v: Tensor, x: Tensor, **how: Any) -> Tensor:
    return layer(q, k, v, x_BTC=x, **how)


def dense(layer: HeadOperators, given: dict[str, Tensor], visible_BHTS: Tensor) -> Tensor:
    """The attention matrices written out, with the operator's definition applied to them."""
    T, S = visible_BHTS.shape[-2:]
    k, v = (given[name].repeat_interleave(H // given[name].shape[1], dim=1) for name in ("k", "v"))
    logits = (given["q"] @ k.mT / D**0.5).masked_fill(~visible_BHTS, -torch.inf)
    P = logits.exp() / logits.exp().sum(-1, keepdim=True)
    U = visible_BHTS.double() / visible_BHTS.sum(-1, keepdim=True)
    I_TS = torch.tensor([[float(s == S - T + t) for s in range(S)] for t in range(T)], dtype=torch.float64)
    ((operator, count),) = layer.claims
    own = slice(H - count, H)
    parameters = {name.partition("_")[2]: p for name, p in layer.named_parameters()}
    y = definition(operator, P[:, own], I_TS, U[:, own], v[:, own], given["x"], parameters)
    return torch.cat([(P @ v)[:, : H - count], y], dim=1)


def definition(
    operator: Any, P: Tensor, I_TS: Tensor, U: Tensor, v: Tensor, x: Tensor, learned: dict[str, Tensor]
) -> Tensor:
    """The formula of each operator's paper, with all matrices written out."""

    def value(name: str) -> Any:
        return learned[name][:, None, None] if name in learned else getattr(operator, name)

    o = P @ v
    match operator.name:
        case "laplacian":
            return (I_TS - P) @ v
        case "mix":
            return (value("alpha") * I_TS + value("beta") * P) @ v
        case "value-only":
            return I_TS @ v
        case "centered":
            return (P - U) @ v
        case "attnscale":
            return (U + (1 + value("strength")) * (P - U)) @ v
        case "shaped":
            return (value("alpha") * I_TS + value("beta") * P - value("gamma") * U) @ v
        case "exclusive":
            own = I_TS @ v
            projection = own[..., :, None] * own[..., None, :] / own.square().sum(-1)[..., None, None]
            share = learned["gate"].tanh()[:, None, None] if "gate" in learned else 1
            return o - share * (projection @ o[..., None])[..., 0]
        case "gate":
            rows = learned["weight"].chunk(o.shape[1])
            gated = [head / (1 + (-(x @ W.mT)[:, None]).exp()) for head, W in zip(o.split(1, 1), rows, strict=True)]
            return torch.cat(gated, dim=1)
    raise ValueError(operator.name)


@every_case
@pytest.mark.parametrize("G", [2])
@pytest.mark.parametrize("kind", ["all", "causal", "cached", "additive"])
def test_an_operator_matches_its_matrix(case: str, G: int, kind: str) -> None:
    T, S = (3, 5) if kind == "cached" else (5, 5)
    given, layer = inputs(T, S, G), layer_of(case)
    how: dict[str, Any] = {"causal": kind in ("causal", "cached")}
    visible = torch.ones(T, S, dtype=torch.bool)
    if how["causal"]:
        visible = visible.tril(S - T)
    elif kind != "all":
        visible = (random(2, H, T, S, seed=9) > 0) | torch.eye(T, dtype=torch.bool)
        how["mask"] = torch.zeros(2, H, T, S).double().masked_fill(~visible, -torch.inf)
    y, expected = run(layer, **given, **how), dense(layer, given, visible.expand(2, H, T, S))
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    direction, wanted = random(*y.shape, seed=8), [*given.values(), *layer.parameters()]
    ours, theirs = (torch.autograd.grad(out, wanted, direction, allow_unused=True) for out in (y, expected))
    for a, b in zip(ours, theirs, strict=True):  # None: it has no part in the output
        assert (a is None or not a.any()) if b is None else torch.allclose(a, b, atol=1e-11)


def gpt(operators: Any, seed: int = 0, **options: Any) -> GPT:
    size = {"layers": 3, "heads": H, "kv_heads": 2, "width": WIDTH, "vocab": 17, "context": 16, **options}
    model = GPT(GPTConfig(**size, operators=operators)).double()
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            p.copy_(random(*p.shape, seed=seed + sum(map(ord, name))) * 0.3)
    return model


@every_case
def test_decoding_in_chunks_matches_the_full_pass(case: str) -> None:
    model = gpt(spec_of(case))
    tokens = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    whole = model(tokens)
    cache = KVCache(model.config, 2, 9, torch.float64, "cpu")
    parts = [model(tokens[:, begin:end], cache) for begin, end in ((0, 4), (4, 5), (5, 8), (8, 9))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-11, rtol=1e-11)


@every_case
def test_zero_heads_of_an_operator_are_bitwise_the_plain_model(case: str) -> None:
    plain, none = gpt(None), gpt(spec_of(case, 0))
    tokens = torch.arange(12).view(1, 12)
    assert plain.state_dict().keys() == none.state_dict().keys()
    assert torch.equal(plain(tokens), none(tokens))
    assert str(none.config.head_plan()) == "0"


@pytest.mark.parametrize("operators", [{"laplacian": 2}, EVERY_LAYER], ids=["laplacian", "every"])
def test_all_other_weights_are_initialised_identically(operators: Any) -> None:
    def same(plain: torch.nn.Module, model: torch.nn.Module) -> None:
        ours = model.state_dict()
        added = ours.keys() - plain.state_dict().keys()
        assert all(".operators." in name for name in added)
        assert all(torch.equal(value, ours[name]) for name, value in plain.state_dict().items())

    def drawn(operators: Any) -> GPT:
        model = GPT(
            GPTConfig(layers=3, heads=H, width=WIDTH, vocab=17, context=16, operators=operators), is_initialised=False
        )
        model.initialise(torch.Generator().manual_seed(3))
        return model

    same(drawn(None), drawn(operators))
    size = {"layers": 3, "heads": H, "width": 32, "laplacian_heads": 0}
    models = [image_recipe(model={**size, "operators": each}).model for each in (None, operators)]
    same(*(build_vit(section, 5) for section in models))
    sections = [dino_recipe(model={**size, "operators": each}).model for each in (None, operators)]
    same(*(StudentTeacher(section, 5) for section in sections))


def test_operator_parameters_are_never_decayed_and_never_use_muon(tmp_path) -> None:
    size = {"layers": 3, "heads": H, "width": 32, "laplacian_heads": 0, "operators": EVERY_LAYER}
    text = tiny_recipe(write_text(tmp_path / "text.txt"), model=size, optimizer={"weight_decay": 0.1})
    image, dino = image_recipe(model=size, optimizer={"weight_decay": 0.1}), dino_recipe(model=size)
    images = classification.Classification(image)
    images.model = build_vit(image.model)
    texts = language_model.LanguageModel(text)
    texts.build(torch.device("meta"))
    groups = [
        *texts.parameter_groups(),
        *images.parameter_groups(),
        *schedules.parameter_groups(dino, StudentTeacher(dino.model)),
    ]
    learned = [(group, name) for group in groups for name in group.parameters if ".operators." in name]
    assert len(learned) == 3 * 8
    for group, name in learned:
        changed = group.at_step(1000) if group.at_step else {}
        assert group.optimizer == ("lamb" if group.name == "without decay" else "adamw"), (
            name
        )  # the image recipe names lamb
        assert {**group.options, **changed}["weight_decay"] == 0.0, name
    with_muon = [name for group in groups if group.optimizer == "muon" for name in group.parameters]
    assert with_muon
    assert not any("operators" in name for name in with_muon)


def test_a_different_plan_with_equal_shapes_refuses_the_weights(tmp_path) -> None:
    """Operators without parameters have the same tensors: only the metadata differs."""
    plan, weights = str(head_plan({"laplacian": 3}, 3, H)), tmp_path / "model.safetensors"
    save_file(gpt({"laplacian": 3}).state_dict(), weights, metadata={"laplacian_heads": plan})
    load_weights(weights, gpt({"laplacian": 3}), plan)
    for other in ({"laplacian": 2}, {"mix": 3}, {"mix": {"heads": 3, "alpha": 0.5}}):
        with pytest.raises(DataError, match="build it with the same heads"):
            load_weights(weights, gpt(other), str(head_plan(other, 3, H)))


class TestPlans:
    def test_the_last_heads_are_claimed_first(self) -> None:
        plan = head_plan({"laplacian": 2, "exclusive": 1}, 3, 4)
        assert plan.grid() == "layers 0-2    A X L L"
        assert plan.per_layer == (2, 2, 2)
        assert str(plan) == '{"laplacian": 2, "exclusive": {"heads": 1, "gate": "none"}}'

    def test_every_form(self) -> None:
        spec = {"centered": "linear(0, 2)", "mix": {"layers": "1-2", "heads": [1, 1, 2], "alpha": 1}}
        assert head_plan(spec, 3, 4).grid().splitlines() == [
            "layer 0       A A A A",
            "layer 1       A A M C",
            "layer 2       M M C C",
        ]
        assert head_plan({"gate": {"heads": "all"}}, 1, 4).grid() == "layer 0       G G G G"
        plan = head_plan(EVERY_LAYER, 3, 4)
        assert head_plan(json.loads(str(plan)), 3, 4) == plan
        assert head_plan(plan.recipe_keys()["operators"], 3, 4) == plan

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ({"laplacain": 2}, "there is no operator 'laplacain'; did you mean laplacian?"),
            ({"laplacian": 3, "exclusive": 2}, "layer 0 has 4 heads, too few for laplacian 3 and exclusive 2"),
            ({"mix": {"alpha": 1}}, "mix needs a number of heads"),
            ({"mix": {"heads": 1, "alhpa": 1}}, "mix has no constant 'alhpa'; did you mean alpha?"),
            ({"gate": {"heads": 1, "form": "wide"}}, "form of gate is headwise or elementwise, got 'wide'"),
            ([{"laplacian": 1}], "a list needs one mapping for each of the 3 layers, got 1"),
            # In a list per layer, a schedule would cover a single layer, and layers would be counted from there.
            ([{}, {"mix": "linear(0, 4)"}, {}], "mix of layer 1: expected a number or all, got 'linear(0, 4)'"),
            # The YAML reading of {centered: linear(0, 4)}.
            ({"centered": "linear(0", "4)": None}, 'centered: within braces write it in quotes, "linear(a, b)"'),
        ],
    )
    def test_invalid_plans_name_the_fault(self, spec: Any, message: str) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            head_plan(spec, 3, 4)
        assert message in str(error.value)


class TestLaplacianize:
    @pytest.mark.parametrize("name", ["centered", "gate"])
    def test_laplacianize_refuses_the_others_with_the_reason(self, name: str) -> None:
        options = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 4}
        model = timm.create_model("vit_tiny_patch16_224", **options)
        before = [type(block.attn) for block in model.blocks]
        with pytest.raises(ValueError, match=f"{name} needs the .*which laplacianize does not provide"):
            lapcli.laplacianize(model, {name: 2})
        assert [type(block.attn) for block in model.blocks] == before
