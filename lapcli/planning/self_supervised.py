"""The plan of self-supervised training with a student and a teacher.

Shapes: M global and L local crops, T tokens, P patches, N masked patches, C width, D bottleneck, K prototypes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapcli.data.images.crops import GLOBALS
from lapcli.data.images.sources import KNOWN_SIZES
from lapcli.heads.plan import HeadPlan
from lapcli.models.self_supervised import Head, StudentTeacher
from lapcli.objectives.dino.cross_entropy import target_cross_entropy
from lapcli.objectives.dino.groups import parameter_groups
from lapcli.objectives.dino.losses import dino_loss, koleo_loss
from lapcli.objectives.dino.masks import mask_counts
from lapcli.objectives.dino.sinkhorn import sinkhorn_targets
from lapcli.objectives.self_supervised import accumulation_in_words, epochs_in_words
from lapcli.planning.download import image_download
from lapcli.planning.kind import with_layers
from lapcli.planning.plan import ImagePlan
from lapcli.planning.pretending import autocast
from lapcli.planning.sketch import Sketch
from lapcli.recipe.self_supervised import SelfSupervisedRecipe


class SelfSupervising:
    keeps_best = False

    def __init__(self, recipe: SelfSupervisedRecipe) -> None:
        self._recipe = recipe
        self.multiple = recipe.train.group

    @property
    def head_plan(self) -> HeadPlan:
        return self._recipe.model.head_plan()

    @property
    def steps(self) -> int | None:
        return self._recipe.steps

    def sketch(self, device: torch.device, bf16: bool, layers: int | None = None, compiled: bool = False) -> Sketch:
        recipe = with_layers(self._recipe, layers)
        with device:
            model = StudentTeacher(recipe.model).train()
        if compiled:
            model.student.backbone.use_compile()
            model.teacher.backbone.use_compile()
        step = _Step(recipe, model, device, bf16)
        return Sketch(
            model,
            parameter_groups(recipe, model),
            step.forward,
            step.loss,
            after_step=lambda: model.update_teacher(0.99),
        )

    def download(self) -> tuple[int | None, str]:
        return image_download(self._recipe.data)

    def plan(self, shared: dict[str, Any]) -> ImagePlan:
        recipe, train = self._recipe, self._recipe.train
        crops, patch = recipe.data.crops, recipe.model.patch
        notes = [epochs_in_words(recipe, KNOWN_SIZES.get(recipe.data.train))]
        notes += accumulation_in_words(shared["accumulation"])
        global_tokens, local_tokens = ((size // patch) ** 2 + 1 for size in (crops.global_size, crops.local_size))
        return ImagePlan(
            **shared,
            epochs=None,
            images=recipe.steps * train.batch,
            tokens_per_image=GLOBALS * global_tokens + crops.locals * local_tokens,
            flops_per_image=shared["flops_per_step"] // train.batch,
            notes={
                "backbone": f"{self._backbone_parameters():,} parameters, student and teacher each",
                "crops": f"{GLOBALS} of {crops.global_size} and {crops.locals} of {crops.local_size} pixels an image",
                "groups": f"masks and neighbours of {train.group} images",
                "length": "\n".join(notes),
            },
            data=recipe.data.train,
        )

    def _backbone_parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in StudentTeacher(self._recipe.model).student.backbone.parameters())


class _Output(NamedTuple):
    teacher_MD: Tensor
    teacher_ND: Tensor
    student_SD: Tensor
    student_ND: Tensor
    class_MC: Tensor
    images: int


class _Step:
    """The objective's loss, with masks of which only the number of hidden patches matters."""

    def __init__(self, recipe: SelfSupervisedRecipe, model: StudentTeacher, device: torch.device, bf16: bool) -> None:
        self._recipe, self._model, self._device, self._bf16 = recipe, model, device, bf16

    def _masked(self, images: int) -> int:
        masks, group = self._recipe.data.masks, self._recipe.train.group
        patches = (self._recipe.data.crops.global_size // self._recipe.model.patch) ** 2
        ratios = masks.ratio[0], masks.ratio[1]
        return images // group * sum(mask_counts(GLOBALS * group, patches, masks.probability, ratios))

    def forward(self, images: int) -> _Output:
        crops, patch = self._recipe.data.crops, self._recipe.model.patch
        student, teacher = self._model.student, self._model.teacher
        with self._device:
            global_MCHW = torch.zeros(GLOBALS * images, 3, crops.global_size, crops.global_size)
            local_LCHW = torch.zeros(crops.locals * images, 3, crops.local_size, crops.local_size)
            masks_MP = torch.zeros(len(global_MCHW), (crops.global_size // patch) ** 2, dtype=torch.bool)
        masked = self._masked(images)
        with torch.no_grad(), autocast(self._device, self._bf16):
            (tokens_MTC,) = teacher.backbone.tokens([global_MCHW])
            teacher_MD = teacher.dino_head(tokens_MTC[:, 0])
            teacher_ND = teacher.ibot_head(_rows(tokens_MTC, masked))
        with autocast(self._device, self._bf16):
            sizes = [global_MCHW, local_LCHW][: 1 + bool(crops.locals)]
            found = student.backbone.tokens(sizes, [masks_MP, None][: len(sizes)])
            class_SC = torch.cat([tokens[:, 0] for tokens in found])
            student_SD = student.dino_head(class_SC)
            student_ND = student.ibot_head(_rows(found[0], masked))
        return _Output(teacher_MD, teacher_ND, student_SD, student_ND, found[0][:, 0], images)

    def loss(self, output: _Output) -> Tensor:
        train, student, teacher = self._recipe.train, self._model.student, self._model.teacher
        tau = train.student_temperature
        dino_MK = self._targets(teacher.dino_head, output.teacher_MD)
        dino, _, _ = dino_loss(
            self._cast(output.student_SD), student.dino_head.prototypes.weight, dino_MK, output.images, tau
        )
        del dino_MK
        ibot_NK = self._targets(teacher.ibot_head, output.teacher_ND)
        weights_N = ibot_NK.new_full((len(ibot_NK),), 1 / max(1, len(ibot_NK)))
        rows_ND = self._cast(output.student_ND)
        ibot, _ = target_cross_entropy(rows_ND, student.ibot_head.prototypes.weight, ibot_NK, weights_N, tau)
        koleo = koleo_loss(output.class_MC, GLOBALS, train.group)
        return train.dino * dino + train.koleo * koleo + train.ibot * ibot

    def _targets(self, head: Head, x_ND: Tensor) -> Tensor:
        weight_KD = head.prototypes.weight
        rows_ND = self._cast(x_ND)
        logits_NK = (rows_ND @ weight_KD.detach().to(rows_ND.dtype).t()).float()
        return sinkhorn_targets(logits_NK, 0.05, self._recipe.train.sinkhorn_iterations)

    def _cast(self, x_ND: Tensor) -> Tensor:
        return x_ND.bfloat16() if self._bf16 else x_ND


def _rows(tokens_MTC: Tensor, count: int) -> Tensor:
    """So many patches, copied as a mask would."""
    patches_NC = tokens_MTC[:, 1:].flatten(0, 1)
    return patches_NC[torch.arange(count, device=tokens_MTC.device)]
