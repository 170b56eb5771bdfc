"""Student and teacher: each a backbone and two heads, one for class tokens (DINO) and one for patches (iBOT).

The teacher starts as a copy of the student and follows it: teacher <- m teacher + (1 - m) student. It has no gradient
and no stochastic depth. Both are in the state dict, so that a resumed run has its teacher too; evaluation uses
the teacher's backbone.

Shapes: N tokens, C width, D bottleneck, K prototypes.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.heads.operator_attention import initialise_operators
from lapcli.models.dino_vit import DinoViT, initialise
from lapcli.recipe.dino import DinoModel


class Head(nn.Module):
    """Three linear layers with GELU in between, L2 normalisation, then prototypes without a bias.

    `forward` stops before the prototypes: the losses apply them in chunks, to save the memory of N x K matrices.
    """

    def __init__(self, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, bottleneck)
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
        # Weights are drawn on the CPU, and the caller's generator is restored.
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


def crop_flops(section: DinoModel, size: int) -> int:
    """Return the FLOPs of one crop's forward through the backbone, a multiply-add counted as two."""
    patches = (size // section.patch) ** 2
    tokens, width = patches + 1, section.width
    block = 2 * tokens * width * width * (4 + 2 * section.mlp_ratio) + 4 * tokens * tokens * width
    return int(section.layers * block + 2 * patches * width * 3 * section.patch**2)
