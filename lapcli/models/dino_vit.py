"""The self-supervised ViT: class token and patches, rotary positions in two dimensions, heads with operators.

A pre-norm block with LayerScale on both branches, no absolute positions, one final norm for all tokens, and a mask
token that replaces hidden patches. Crops of several sizes are processed together: norms and linear layers see the
tokens of all of them in one matrix, attention each size separately.

Stochastic depth drops whole images from a branch: of b images `max(int(b (1 - rate)), 1)` are kept, drawn separately
for each branch and crop size, and the branch's output for them is scaled by b / kept.

State-dict names are those of timm's `vit_small_patch16_dinov3` (built with `attn_type="rope"` and biases), where only
the mask token has no counterpart: `to_timm`.

Student and teacher are such a ViT and two heads each, one for class tokens (DINO) and one for patches (iBOT). The
teacher starts as a copy of the student and follows it: teacher <- m teacher + (1 - m) student. It has no gradient and
no stochastic depth. Both are in the state dict, so that a resumed run has its teacher too; evaluation uses the
teacher's ViT.

Shapes: B images, T tokens, P patches, C channels, H heads, D head size (in `Head` the bottleneck), N tokens of all
images of all crop sizes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.heads.laplacian import HeadOperators, initialise_operators
from lapcli.heads.plan import HeadPlan
from lapcli.models.compiling import compiled
from lapcli.recipe.dino import DinoModel


def rotary_tables(
    rows: int, columns: int, head_size: int, base: float, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each token, T x D: the class token first, which is not rotated, then the patches by row.

    The centre of patch (i, j) is at ((i + 0.5) / rows, (j + 0.5) / columns), mapped to [-1, 1]. With the D / 4 periods
    base^(2 j / (D / 2)) the angles are 2 pi coordinate / period: a quarter from the row, a quarter from the column, and
    both again for the second half of the head.
    """
    # In `dtype` from the start: with bf16, coordinates and periods are rounded too, as in upstream's training.
    quarter = head_size // 4
    periods = base ** (2 * torch.arange(quarter, dtype=dtype) / (head_size // 2))
    y, x = ((torch.arange(count, dtype=dtype) + 0.5) / count * 2 - 1 for count in (rows, columns))
    centres_P2 = torch.cartesian_prod(y, x)
    angles = (2 * math.pi * centres_P2[:, :, None] / periods).flatten(1).tile(2)
    return F.pad(angles.cos(), (0, 0, 1, 0), value=1.0), F.pad(angles.sin(), (0, 0, 1, 0))


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate element d of the first half with element d of the second, in the dtype of the tables."""
    wide = x_BHTD.to(cos_TD.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos_TD + torch.cat([-second, first], dim=-1) * sin_TD).to(x_BHTD.dtype)


@dataclass(frozen=True)
class CropGroup:
    """Images of one size among the tokens that go through a block together."""

    images: int
    tokens: int  # of an image
    cos_TD: Tensor
    sin_TD: Tensor

    @property
    def size(self) -> int:
        return self.images * self.tokens

    def of(self, images: int) -> "CropGroup":
        return CropGroup(images, self.tokens, self.cos_TD, self.sin_TD)


class RotaryAttention(nn.Module):
    def __init__(self, width: int, plan: HeadPlan, layer: int) -> None:
        super().__init__()
        self.heads = plan.heads
        self.operators = HeadOperators(plan, layer, width // plan.heads, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x_NC: Tensor, groups: Sequence[CropGroup]) -> Tensor:
        sizes = [group.size for group in groups]
        parts = zip(self.qkv(x_NC).split(sizes), x_NC.split(sizes), groups, strict=True)
        mixed = [self._attend(*part) for part in parts]
        return self.proj(torch.cat(mixed) if len(mixed) > 1 else mixed[0])

    def queries_keys_values(self, qkv_NC: Tensor, group: CropGroup) -> tuple[Tensor, Tensor, Tensor]:
        split = qkv_NC.view(group.images, group.tokens, 3, self.heads, -1)
        q_BHTD, k_BHTD, v_BHTD = split.permute(2, 0, 3, 1, 4).unbind(0)
        q_BHTD, k_BHTD = (rotate(x, group.cos_TD, group.sin_TD) for x in (q_BHTD, k_BHTD))
        return q_BHTD, k_BHTD, v_BHTD

    def _attend(self, qkv_NC: Tensor, x_NC: Tensor, group: CropGroup) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = self.queries_keys_values(qkv_NC, group)
        v_BHTD = v_BHTD.contiguous()  # a view would keep q, k and v in memory for the backward
        x_BTC = x_NC.view(group.images, group.tokens, -1)
        y_BHTD = self.operators(q_BHTD, k_BHTD, v_BHTD, x_BTC=x_BTC)
        return y_BHTD.transpose(1, 2).reshape(group.size, -1)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x_NC: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x_NC)))


class Block(nn.Module):
    def __init__(
        self, width: int, plan: HeadPlan, layer: int, hidden: int, layer_scale: float, drop_path: float
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = RotaryAttention(width, plan, layer)
        self.gamma_1 = nn.Parameter(torch.full((width,), layer_scale))
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)
        self.gamma_2 = nn.Parameter(torch.full((width,), layer_scale))

    def forward(self, x_NC: Tensor, groups: Sequence[CropGroup]) -> Tensor:
        x_NC = self._add(x_NC, groups, lambda x, kept: self.gamma_1 * self.attn(self.norm1(x), kept))
        return self._add(x_NC, groups, lambda x, _: self.gamma_2 * self.mlp(self.norm2(x)))

    def _add(
        self,
        x_NC: Tensor,
        groups: Sequence[CropGroup],
        branch: Callable[[Tensor, Sequence[CropGroup]], Tensor],
    ) -> Tensor:
        if not (self.training and self.drop_path):
            return x_NC + branch(x_NC, groups).to(x_NC.dtype)
        kept = [group.of(max(int(group.images * (1 - self.drop_path)), 1)) for group in groups]
        rows, scales, first = [], [], 0
        for group, kept_group in zip(groups, kept, strict=True):
            # From the device's default generator, which the loop seeds for each micro-step and rank.
            images = torch.randperm(group.images, device=x_NC.device)[: kept_group.images]
            positions = torch.arange(group.tokens, device=x_NC.device)
            rows.append((first + images[:, None] * group.tokens + positions).flatten())
            # Not 1 / (1 - rate): the number of kept images is rounded down.
            scale = group.images / kept_group.images
            scales.append(x_NC.new_full((kept_group.size, 1), scale, dtype=torch.float32))
            first += group.size
        rows_N = torch.cat(rows)
        added = branch(x_NC[rows_N], kept) * torch.cat(scales)
        return x_NC.index_add(0, rows_N, added.to(x_NC.dtype))  # under autocast the branch has another dtype


class PatchEmbedding(nn.Module):
    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, patch)  # torch's initialisation: uniform within 1 / sqrt(3 patch^2)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return self.proj(images_BCHW).flatten(2).transpose(1, 2)


class DinoViT(nn.Module):
    """ViT-S/16 with the section's defaults: 21,599,616 parameters."""

    def __init__(self, section: DinoModel, drop_path: float = 0.0) -> None:
        """`drop_path` is a separate argument: the student uses the section's value, its teacher 0."""
        super().__init__()
        width, heads = section.width, section.heads
        self.plan = section.head_plan()
        self.width, self.patch, self.head_size = width, section.patch, width // heads
        self.rope_base = section.rope_base
        self.rope_dtype = torch.bfloat16 if section.rope_precision == "bf16" else torch.float32
        self.stream: torch.dtype | None = None  # of the residual stream; None: that of the class token
        self._compiled_blocks: Callable[[Tensor, list[CropGroup]], Tensor] | None = None
        self._tables: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
        self.patch_embed = PatchEmbedding(width, section.patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.mask_token = nn.Parameter(torch.zeros(1, width))
        hidden = int(section.mlp_ratio * width)
        self.blocks = nn.ModuleList(
            Block(width, self.plan, layer, hidden, section.layer_scale, drop_path) for layer in range(section.layers)
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.apply(initialise)
        nn.init.normal_(self.cls_token, std=0.02)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return the class token after the final norm."""
        return self.tokens([images_BCHW])[0][:, 0]

    def tokens(self, crops: Sequence[Tensor], masks: Sequence[Tensor | None] | None = None) -> list[Tensor]:
        """Return class token and patches after the final norm, for each crop size.

        `masks` has, for each size, B x P booleans (True: the mask token replaces the patch) or None.
        """
        x_NC, groups = self._embed(crops, masks or [None] * len(crops))
        return _by_image((self._compiled_blocks or self._through_blocks)(x_NC, groups), groups)

    def _through_blocks(self, x_NC: Tensor, groups: list[CropGroup]) -> Tensor:
        for block in self.blocks:
            x_NC = block(x_NC, groups)
        return self.norm(x_NC)

    def use_compile(self) -> "DinoViT":
        """Compile `tokens`, which training and its validation call."""
        self._compiled_blocks = compiled(self._through_blocks)
        return self

    def _embed(self, crops: Sequence[Tensor], masks: Sequence[Tensor | None]) -> tuple[Tensor, list[CropGroup]]:
        parts, groups = [], []
        for images_BCHW, mask_BP in zip(crops, masks, strict=True):
            rows, columns = (size // self.patch for size in images_BCHW.shape[-2:])
            patches_BPC = self.patch_embed(images_BCHW)
            if mask_BP is not None:
                patches_BPC = torch.where(mask_BP[:, :, None], self.mask_token.to(patches_BPC.dtype), patches_BPC)
            # The class token is float32, so x is too, for any convolution dtype.
            first_B1C = self.cls_token.expand(len(patches_BPC), -1, -1)
            parts.append(torch.cat([first_B1C, patches_BPC], dim=1).flatten(0, 1))
            cos_TD, sin_TD = self._rotary(rows, columns, images_BCHW.device)
            groups.append(CropGroup(len(images_BCHW), 1 + rows * columns, cos_TD, sin_TD))
        x_NC = torch.cat(parts)
        return x_NC.to(self.stream or x_NC.dtype), groups

    def _rotary(self, rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = rows, columns, device
        if key not in self._tables:
            tables = rotary_tables(rows, columns, self.head_size, self.rope_base, self.rope_dtype)
            self._tables[key] = tables[0].to(device), tables[1].to(device)
        return self._tables[key]


def initialise(module: nn.Module) -> None:
    """Initialise linear layers: truncated normal of deviation 0.02, bias 0. All other modules keep torch's values."""
    if isinstance(module, nn.Linear):
        # timm's Eva then divides proj and fc2 by sqrt(2 (layer + 1)); upstream does not.
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _by_image(x_NC: Tensor, groups: Sequence[CropGroup]) -> list[Tensor]:
    parts = x_NC.split([group.size for group in groups])
    return [part.view(group.images, group.tokens, -1) for part, group in zip(parts, groups, strict=True)]


def to_timm(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert for `timm.create_model("vit_small_patch16_dinov3", **TIMM_OPTIONS)`, without the mask token."""
    return {name: value for name, value in state.items() if name != "mask_token"}


#: Options with which timm's model computes the same function, without a head.
TIMM_OPTIONS = {
    "attn_type": "rope",
    "qkv_bias": True,
    "num_reg_tokens": 0,
    "norm_layer": partial(nn.LayerNorm, eps=1e-6),
    "global_pool": "token",
    "num_classes": 0,
}


class Head(nn.Module):
    """Three linear layers with GELU in between, L2 normalisation, then prototypes without a bias.

    `forward` stops before the prototypes: the losses apply them in chunks, to save the memory of N x K matrices.
    """

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, bottleneck)
        # Without weight normalisation: upstream has keys for it in its configuration, which nothing reads.
        self.prototypes = nn.Linear(bottleneck, prototypes, bias=False)
        self.apply(initialise)

    def forward(self, x_NC: Tensor) -> Tensor:
        x_ND = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x_NC)))))
        return F.normalize(x_ND.float(), dim=-1, eps=1e-12)


class Network(nn.Module):
    """A student or a teacher."""

    def __init__(self, section: DinoModel, drop_path: float) -> None:
        super().__init__()
        head = section.head
        self.backbone = DinoViT(section, drop_path)
        self.dino_head = Head(section.width, head.hidden, head.bottleneck, head.dino_prototypes)
        self.ibot_head = Head(section.width, head.hidden, head.bottleneck, head.ibot_prototypes)


class StudentTeacher(nn.Module):
    def __init__(self, section: DinoModel, seed: int | None = None) -> None:
        super().__init__()
        # Weights are initialised on the CPU, and the caller's generator is restored.
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            self.student = Network(section, section.drop_path)
            self.teacher = Network(section, drop_path=0.0)
            if not self.student.backbone.cls_token.is_meta:
                initialise_operators(self.student)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        teacher: list[Tensor] = list(self.teacher.parameters())
        torch._foreach_lerp_(teacher, list[Tensor](self.student.parameters()), 1 - momentum)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the student's parameters, by their names in the state dict."""
        return self.student.named_parameters(prefix="student")
