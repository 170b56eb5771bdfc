"""Attention whose heads have operators: SDPA once, then each operator on its own heads, and no T x T matrix.

A layer without operators is plain attention bit for bit, and one whose only operator is the Laplacian takes the path of
`lapcli/heads/laplacian.py`. The parameters of operators are `operators.<operator>_<parameter>` in the state dict of a
layer's attention. They stay float32; an operator's output is cast back to the dtype of the activations.

Shapes: B batch, H query heads, G key and value heads, T query tokens, S key tokens, D head size, C width.
"""

import re
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.heads.laplacian import laplacian_attention
from lapcli.heads.operators import INPUT, MEAN, HeadState, Learnt, Operator
from lapcli.heads.plan import HeadPlan, LayerClaims


class HeadOperators(nn.Module):
    """The operators of one layer's heads and their parameters."""

    def __init__(self, plan: HeadPlan, layer: int, head_size: int, width: int) -> None:
        super().__init__()
        self.claims: LayerClaims = plan.layers[layer]
        self.heads = plan.heads
        self.laplacian_heads = plan.per_layer[layer]
        self.is_laplacian = sum(n for _, n in self.claims) == self.laplacian_heads  # or plain attention
        self._learnt: dict[str, Learnt] = {}
        self._names: list[dict[str, str]] = []  # per claim: the operator's name of a parameter -> its name here
        for operator, heads in self.claims:
            prefix = re.sub(r"\W", "_", operator.name)  # torch refuses names of parameters with a dot
            learnt = operator.parameters(heads, head_size, width)
            self._names.append({name: f"{prefix}_{name}" for name in learnt})
            for name, each in learnt.items():
                self._learnt[f"{prefix}_{name}"] = each
                self.register_parameter(f"{prefix}_{name}", nn.Parameter(torch.full(each.shape, each.start)))

    def learnt(self, operator: Operator) -> dict[str, Tensor]:
        """Return the parameters of one of the layer's operators, by the operator's names."""
        for (claimed, _), names in zip(self.claims, self._names, strict=True):
            if claimed == operator:
                return {name: getattr(self, registered) for name, registered in names.items()}
        return {}

    def learnt_numbers(self) -> dict[str, tuple[int, Tensor]]:
        """Return the learned parameter of each head in use, by name: the first head, and the values from it on."""
        numbers, end = {}, self.heads
        for operator, count in self.claims:
            for name, parameter in self.learnt(operator).items():
                if parameter.shape == (count,):
                    is_tanh = operator.name == "exclusive" and name == "gate"
                    number_H = (parameter.tanh() if is_tanh else parameter).detach()
                    numbers[f"{operator.name}_{name}"] = (end - count, number_H)
            end -= count
        return numbers

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Set every parameter to its start value, or draw it if it has a deviation."""
        for name, parameter in self.named_parameters():
            learnt = self._learnt[name]
            if learnt.deviation:
                parameter.normal_(learnt.start, learnt.deviation, generator=generator)
            else:
                parameter.fill_(learnt.start)

    def forward(
        self,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        x_BTC: Tensor | None = None,
        causal: bool = False,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        current_v_BGTD: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the output projection, B x H x T x D; arguments are those of `laplacian_attention`."""
        if self.is_laplacian and not dropout:
            return laplacian_attention(
                q_BHTD, k_BGSD, v_BGSD, self.laplacian_heads, causal=causal, mask=mask, current_v_BGTD=current_v_BGTD
            )
        T, S = q_BHTD.shape[2], k_BGSD.shape[2]
        current_v_BGTD = v_BGSD[:, :, S - T :] if current_v_BGTD is None else current_v_BGTD
        # Only timm's models pass a dropout. They have no cache, so SDPA's own causal flag is right.
        if dropout:  # it applies to P: the Laplacian head is v - dropout(P) v
            o_BHTD = F.scaled_dot_product_attention(
                q_BHTD, k_BGSD, v_BGSD, mask, dropout, causal, enable_gqa=k_BGSD.shape[1] != q_BHTD.shape[1]
            )
        else:
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
                heads_mask = _of_heads(mask, begin, end)
                mean = visible_mean(self._own(v_BGSD, begin, end), o_BHTD.shape[2], causal, heads_mask)
            parameters = {name: getattr(self, registered) for name, registered in names.items()}
            state = HeadState(parameters, mean, x_BTC if INPUT in operator.needs else None)
            y = operator.apply(self._own(current_v_BGTD, begin, end), o_BHTD[:, begin:end], state)
            parts.append(y.to(o_BHTD.dtype))  # means and learned parameters are float32 and widen it
            end = begin
        if end:
            parts.append(o_BHTD[:, :end])
        return parts[0] if len(parts) == 1 else torch.cat(parts[::-1], dim=1)

    def _own(self, v_BGTD: Tensor, begin: int, end: int) -> Tensor:
        """Return the values of some heads, repeated if query heads share them."""
        groups = v_BGTD.shape[1]
        v_BHTD = v_BGTD if groups == self.heads else v_BGTD.repeat_interleave(self.heads // groups, dim=1)
        return v_BHTD[:, begin:end]


def _of_heads(mask: Tensor | None, begin: int, end: int) -> Tensor | None:
    """Return the mask of these heads; a mask without a dimension of heads applies to all."""
    return mask if mask is None or mask.ndim < 3 or mask.shape[-3] == 1 else mask[..., begin:end, :, :]


def visible_mean(v_BHSD: Tensor, tokens: int, causal: bool, mask: Tensor | None) -> Tensor:
    """Return the mean of the values visible to each of the last `tokens` queries, in float32 at least.

    Without a mask it is the mean of all values, or with `causal` the cumulative mean: no T x S matrix is built. A mask
    is such a matrix already.
    """
    wide = torch.promote_types(v_BHSD.dtype, torch.float32)
    if mask is not None:
        # Only -inf hides a key: one with a large negative number would count as visible.
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
                bias.register_hook(partial(_without, 2 * width + begin * size, 2 * width + end * size))
            end = begin


def _without(begin: int, end: int, gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[begin:end] = 0
    return gradient


def initialise_operators(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Initialise all operators; call it after all other weights are drawn, so that those do not depend on operators."""
    for module in model.modules():
        if isinstance(module, HeadOperators):
            module.initialise(generator)
