"""Laplacian heads: the graph Laplacian `I - P` in place of the softmax matrix `P` in some heads of a layer; and layers
whose heads have any operators.

Paper: "Laplacian Heads Improve Transformers by Smoothing Token Representations" (equation 3).

    attention head    y_h = P_h v_h          = sdpa(q_h, k_h, v_h)
    Laplacian head    y_h = (I - P_h) v_h    = v_h - sdpa(q_h, k_h, v_h)

The last `laplacian_heads` of the `H` heads are the Laplacian ones. `P` is never built, and no parameter is added.
Rows of `P` sum to one, so everything constant over the tokens (such as a bias of the values) vanishes.

Other operators (`lapcli/heads/operators.py`) are epilogues of SDPA as well, each on its own heads. A layer without
operators is plain attention bit for bit. Parameters of operators are `operators.<operator>_<parameter>` in the state
dict of a layer's attention. They stay float32; an operator's output is cast back to the dtype of the activations.

Shapes: B batch, H query heads, G key and value heads (G divides H), T query tokens, S key tokens, D head size, C width.
"""

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.heads.operators import INPUT, MEAN, HeadState, Learned, Operator
from lapcli.heads.plan import HeadPlan, LayerClaims


def laplacian_attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    laplacian_heads: int,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    scale: float | None = None,
    current_v_BGTD: Tensor | None = None,
) -> Tensor:
    """Compute attention whose last `laplacian_heads` heads apply `I - P`; with 0 it is bitwise plain attention.

    Args:
        causal: Tokens attend to themselves and to those before them. With a cache (S > T) the queries are the last T of
            the S tokens.
        mask: Boolean (True: may attend) or additive, broadcast to B, H, T, S; instead of `causal`.
        scale: Factor of the logits; 1 / sqrt(D) by default.
        current_v_BGTD: Values of the query tokens, from which the mean is subtracted. By default the last T of
            the S values, correct with and without a cache; a padded cache has to pass its own.
    """
    H, T = q_BHTD.shape[1:3]
    G, S = k_BGSD.shape[1], k_BGSD.shape[2]
    if not 0 <= laplacian_heads <= H:
        raise ValueError(f"{H} heads, so 0 to {H} of them can be Laplacian, got {laplacian_heads}")
    if H % G:
        raise ValueError(f"{H} query heads cannot share {G} key and value heads evenly")
    if causal and mask is not None:
        raise ValueError("give either a mask or causal, not both")
    if T > S and (causal or (laplacian_heads and current_v_BGTD is None)):
        raise ValueError(f"{T} query tokens cannot be the last of {S} key tokens")
    if causal and S != T:
        # SDPA aligns its causal flag to the first key; with a cache the last query is the last key.
        causal = False
        # A single query is the last key and sees all of them, without a mask.
        mask = None if T == 1 else torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).tril(S - T)

    # Before SDPA, so that the backward pads this gradient to all heads only after SDPA's backward, the memory peak.
    current_v_BGTD = v_BGSD[:, :, S - T :] if current_v_BGTD is None else current_v_BGTD
    v_BHTD = _repeated(current_v_BGTD, H)[:, H - laplacian_heads :]
    mean_BHTD = F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=G != H
    )
    if not laplacian_heads:
        return mean_BHTD
    y_BHTD = mean_BHTD.clone()  # SDPA's backward needs the unchanged mean
    y_BHTD[:, H - laplacian_heads :].neg_().add_(v_BHTD)
    return y_BHTD


def _repeated(v_BGTD: Tensor, heads: int) -> Tensor:
    """Repeat values that query heads share: head h has the values h // (H / G), as SDPA's enable_gqa assigns them."""
    groups = v_BGTD.shape[1]
    return v_BGTD if groups == heads else v_BGTD.repeat_interleave(heads // groups, dim=1)


class HeadOperators(nn.Module):
    """The operators of one layer's heads and their parameters."""

    def __init__(self, plan: HeadPlan, layer: int, head_size: int, width: int) -> None:
        super().__init__()
        self.claims: LayerClaims = plan.layers[layer]
        self.heads = plan.heads
        self.laplacian_heads = plan.per_layer[layer]
        self.is_laplacian = sum(n for _, n in self.claims) == self.laplacian_heads  # or plain attention
        self._learned: dict[str, Learned] = {}
        self._names: list[dict[str, str]] = []  # per claim: the operator's name of a parameter -> its name here
        for operator, heads in self.claims:
            prefix = re.sub(r"\W", "_", operator.name)  # torch refuses names of parameters with a dot
            learned = operator.parameters(heads, head_size, width)
            self._names.append({name: f"{prefix}_{name}" for name in learned})
            for name, each in learned.items():
                self._learned[f"{prefix}_{name}"] = each
                self.register_parameter(f"{prefix}_{name}", nn.Parameter(torch.full(each.shape, each.start)))

    def learned(self, operator: Operator) -> dict[str, Tensor]:
        """Return the parameters of one of the layer's operators, by the operator's names."""
        for (claimed, _), names in zip(self.claims, self._names, strict=True):
            if claimed == operator:
                return {name: getattr(self, registered) for name, registered in names.items()}
        return {}

    def learned_values(self) -> dict[str, tuple[int, Tensor]]:
        """Return the learned parameter of each head in use, by name: the first head, and the values from it on."""
        numbers, end = {}, self.heads
        for operator, count in self.claims:
            for name, parameter in self.learned(operator).items():
                if parameter.shape == (count,):
                    is_tanh = operator.name == "exclusive" and name == "gate"
                    number_H = (parameter.tanh() if is_tanh else parameter).detach()
                    numbers[f"{operator.name}_{name}"] = (end - count, number_H)
            end -= count
        return numbers

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Set every parameter to its start value, or randomly if it has a deviation."""
        for name, parameter in self.named_parameters():
            learned = self._learned[name]
            if learned.deviation:
                parameter.normal_(learned.start, learned.deviation, generator=generator)
            else:
                parameter.fill_(learned.start)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        x_BTC: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        current_v_BGTD: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the output projection, B x H x T x D; arguments are those of `laplacian_attention`."""
        if self.is_laplacian:
            return laplacian_attention(
                q_BHTD, k_BGSD, v_BGSD, self.laplacian_heads, causal=causal, mask=mask, current_v_BGTD=current_v_BGTD
            )
        T, S = q_BHTD.shape[2], k_BGSD.shape[2]
        current_v_BGTD = v_BGSD[:, :, S - T :] if current_v_BGTD is None else current_v_BGTD
        o_BHTD = laplacian_attention(q_BHTD, k_BGSD, v_BGSD, 0, causal=causal, mask=mask)
        return self.epilogue(o_BHTD, v_BGSD, current_v_BGTD, x_BTC=x_BTC, causal=causal, mask=mask)

    def epilogue(
        self,
        o_BHTD: Tensor,
        v_BGSD: Tensor,
        current_v_BGTD: Tensor,
        *,
        x_BTC: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Apply each operator to its heads of SDPA's output; the other heads stay unchanged."""
        parts: list[Tensor] = []
        end = self.heads  # operators claim heads from the last one backwards
        for (operator, count), names in zip(self.claims, self._names, strict=True):
            begin = end - count
            mean = None
            if MEAN in operator.needs:
                # A mask without a head dimension applies to all heads.
                is_shared = mask is None or mask.ndim < 3 or mask.shape[-3] == 1
                own = mask if is_shared else mask[..., begin:end, :, :]  # type: ignore[index]
                mean = visible_mean(_repeated(v_BGSD, self.heads)[:, begin:end], o_BHTD.shape[2], causal, own)
            parameters = {name: getattr(self, registered) for name, registered in names.items()}
            state = HeadState(parameters, mean, x_BTC if INPUT in operator.needs else None)
            y = operator.apply(_repeated(current_v_BGTD, self.heads)[:, begin:end], o_BHTD[:, begin:end], state)
            parts.append(y.to(o_BHTD.dtype))  # means and learned parameters are float32 and widen it
            end = begin
        if end:
            parts.append(o_BHTD[:, :end])
        return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=1)


def visible_mean(v_BHSD: Tensor, tokens: int, causal: bool, mask: Tensor | None) -> Tensor:
    """Return the mean of the values visible to each of the last `tokens` queries, in float32 at least.

    Without a mask it is the mean of all values, or with `causal` the cumulative mean: no T x S matrix is built. A mask
    is such a matrix already.
    """
    wide = torch.promote_types(v_BHSD.dtype, torch.float32)
    if mask is not None:
        # Only -inf hides a key: a large negative number would count as visible.
        visible = (mask if mask.dtype == torch.bool else mask > -torch.inf).to(wide)
        return visible @ v_BHSD.to(wide) / visible.sum(-1, keepdim=True)
    S = v_BHSD.shape[2]
    if not causal:
        return v_BHSD.mean(2, keepdim=True, dtype=wide)
    before = S - tokens
    # Not in bf16: beyond a few hundred tokens a sum would no longer change by the next value.
    sums_BHTD = v_BHSD[:, :, before:].cumsum(2, dtype=wide)
    if before:
        sums_BHTD = sums_BHTD + v_BHSD[:, :, :before].sum(2, keepdim=True, dtype=wide)
    return sums_BHTD / torch.arange(before + 1, S + 1, dtype=wide, device=v_BHSD.device)[:, None]  # visible keys


def operator_parameters(model: nn.Module) -> set[str]:
    """Return the names of operators' parameters: never decayed, and updated by AdamW even where the rest uses Muon."""
    modules = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, HeadOperators)]
    return {f"{prefix}.{name}" for prefix, module in modules for name, _ in module.named_parameters()}


def freeze_vanishing_biases(model: nn.Module) -> None:
    """Give the value bias of heads whose rows sum to zero no gradient, before training.

    It changes no output, and its gradient is rounding noise, which Adam would turn into a random walk. Biases of
    queries, keys and values are one vector, in this order, as in timm.
    """
    for module in model.modules():
        operators, bias = getattr(module, "operators", None), getattr(getattr(module, "qkv", None), "bias", None)
        if not isinstance(operators, HeadOperators) or bias is None:
            continue
        end, width = operators.heads, len(bias) // 3
        for operator, count in operators.claims:
            begin, size = end - count, width // operators.heads
            if operator.rows_sum_to_zero and bias.requires_grad:
                part = slice(2 * width + begin * size, 2 * width + end * size)
                bias.register_hook(partial(_without, part))
            end = begin


def _without(part: slice, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[part] = 0
    return gradient


def initialise_operators(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Initialise all operators; call it after all other weights, so that those do not depend on operators."""
    for module in model.modules():
        if isinstance(module, HeadOperators):
            module.initialise(generator)
