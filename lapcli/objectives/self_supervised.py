"""Self-supervised training: DINO between class tokens, iBOT between masked patches, KoLeo to spread the features.

A step: the teacher gets both global crops of each image; the student gets them with masked patches, and the
local crops. Teacher outputs become targets by Sinkhorn-Knopp over the images of all processes; the student learns to
predict them. Afterwards the teacher follows the student.

Masks and KoLeo's neighbours belong to fixed groups of the global batch, so that they do not depend on the number of
processes. With accumulation Sinkhorn-Knopp sees the images of one micro-step of all processes, not of the full batch.

Shapes: G global and Q local crops of B images, M = G B, L = Q B, P patches, N masked patches, C width, D bottleneck,
K prototypes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lapcli.data.images.colours import Recolouring
from lapcli.data.images.crops import GLOBALS, BatchMasks, CropReader, mask_counts
from lapcli.data.images.image_set import ImageSet, ImageSubset
from lapcli.data.images.loader import ImageBatches, seconds_to_read
from lapcli.data.images.sources import ImageData
from lapcli.measures.accuracy import classify, evaluation_batches
from lapcli.models import compiling
from lapcli.models.dino_vit import Head, StudentTeacher
from lapcli.objectives.classification import ImageObjective
from lapcli.objectives.dino_losses import dino_loss, koleo_loss, patch_weights, sinkhorn_targets, target_cross_entropy
from lapcli.objectives.objective import ParameterGroup, PlanFacts
from lapcli.objectives.schedules import half_cosine, parameter_groups, peak_rate, ramp, rate_multiplier
from lapcli.recipe.dino import SelfSupervisedRecipe
from lapcli.runtime.devices import ComputePolicy, to_device
from lapcli.runtime.ranks import World

NEIGHBOUR_KEYS = 10_000  # training images at most that vote at a validation, evenly spread
VOTE_TEMPERATURE = 0.07  # of their votes, as in DINOv3's k-NN evaluation


@dataclass(frozen=True)
class CropBatch:
    global_MCHW: Tensor  # crop by crop, normalised
    local_LCHW: Tensor
    masks_MP: Tensor  # True: hidden from the student
    hidden_N: Tensor  # indices of the hidden patches among all M P
    images: int
    step: int


class SelfSupervised(ImageObjective[SelfSupervisedRecipe]):
    model: StudentTeacher

    def __init__(self, recipe: SelfSupervisedRecipe) -> None:
        super().__init__(recipe)
        self.image_size = recipe.data.crops.global_size
        self.steps = recipe.steps
        self._seen: list[dict[str, Tensor]] = []  # metrics of each micro-step of an update

    @property
    def multiple(self) -> int:
        return self.recipe.train.group

    def use(self, data: ImageData, world: World) -> None:
        super().use(data, world)
        recipe, train = self.recipe, self.recipe.train
        self._images = ImageBatches(len(data.train), batch=train.batch, group=train.group, repeats=1, seed=recipe.seed)
        side = recipe.data.crops.global_size // recipe.model.patch
        first = partial(self.batches.first, rank=world.rank)
        masks = BatchMasks((side, side), recipe.data, recipe.seed, train.group, self.batches.micro_batch, first)
        self.start_workers(CropReader(data.train, recipe.data, recipe.seed, masks))
        steps, per_epoch = recipe.steps, recipe.schedule.epoch_steps
        passes = f"{steps * train.batch / len(data.train):.4g} passes over {len(data.train):,} images"
        self.notes = [f"{steps:,} steps are {steps / per_epoch:.4g} epochs of {per_epoch:,} steps, and {passes}"]
        if self.batches.accumulation > 1:
            self.notes.append(
                f"{self.batches.accumulation} micro-steps are accumulated: Sinkhorn-Knopp balances each one "
                "separately, not the whole batch; masks and neighbours are the same"
            )

    def build(self, device: torch.device, policy: ComputePolicy | None = None) -> None:
        super().build(device, policy)
        if self.policy.bf16 and self.recipe.train.stream == "bf16":
            self.model.student.backbone.stream = self.model.teacher.backbone.stream = torch.bfloat16
        # On a CPU, where pieces fit into the cache, fusing gains less than compiling costs.
        compiles = self.policy.compiles and device.type == "cuda"
        self._recolour = Recolouring(
            self.recipe.data, partial(compiling.compiled, any_length=True) if compiles else None
        )

    @classmethod
    def new_model(cls, recipe: SelfSupervisedRecipe, seed: int | None) -> nn.Module:
        return StudentTeacher(recipe.model, seed)

    @classmethod
    def evaluated(cls, model: StudentTeacher) -> nn.Module:
        return model.teacher.backbone  # which is what upstream always evaluates

    def compile(self) -> None:
        for network in (self.model.student, self.model.teacher):
            network.backbone.use_compile()
            network.dino_head.compile(**compiling.OPTIONS)
            network.ibot_head.compile(**compiling.OPTIONS)

    def parameter_groups(self) -> list[ParameterGroup]:
        return parameter_groups(self.recipe, self.model)

    def batch(self, step: int, micro_step: int) -> CropBatch:
        *crops, global_GBK, local_QBK, masks_MP, hidden_N = self._loader.batch(step, micro_step)
        global_MCHW, local_LCHW = (
            self._recolour(crops_NHWC.flatten(0, 1), drawn_NK.flatten(0, 1))
            for crops_NHWC, drawn_NK in zip(to_device(crops, self.world.device), (global_GBK, local_QBK), strict=True)
        )
        masks_MP, hidden_N = to_device((masks_MP, hidden_N), self.world.device)
        return CropBatch(global_MCHW, local_LCHW, masks_MP, hidden_N, self.batches.micro_batch, step)

    def synthetic_batch(self, examples: int, device: torch.device) -> CropBatch:
        """Return a batch of zeros with as many masked patches as a real batch."""
        images = examples
        crops, masks, group = self.recipe.data.crops, self.recipe.data.masks, self.recipe.train.group
        patches = (crops.global_size // self.recipe.model.patch) ** 2
        hidden = images // group * sum(mask_counts(GLOBALS * group, patches, masks.probability, masks.ratio))
        with device:
            return CropBatch(
                torch.zeros(GLOBALS * images, 3, crops.global_size, crops.global_size),
                torch.zeros(crops.locals * images, 3, crops.local_size, crops.local_size),
                torch.zeros(GLOBALS * images, patches, dtype=torch.bool),
                torch.arange(hidden),
                images,
                step=0,
            )

    def teacher_temperature(self, step: int) -> float:
        schedule = self.recipe.schedule
        start, end = schedule.teacher_temperature
        return ramp(start, end, step, round(schedule.teacher_warmup_epochs * schedule.epoch_steps))

    def loss(self, batch: CropBatch) -> Tensor:
        """Return the loss; its parts are kept for `update_metrics`."""
        train = self.recipe.train
        temperature = self.teacher_temperature(batch.step)
        student, teacher = self.model.student, self.model.teacher
        with torch.no_grad(), self.policy.autocast():
            (tokens_MTC,) = teacher.backbone.tokens([batch.global_MCHW])
            dino_MD = teacher.dino_head(tokens_MTC[:, 0])
            ibot_ND = teacher.ibot_head(_patches(tokens_MTC, batch.hidden_N))
        dino_MK = self._targets(teacher.dino_head, dino_MD, temperature)

        with self.policy.autocast():
            crops: list[Tensor] = [batch.global_MCHW]
            masks: list[Tensor | None] = [batch.masks_MP]
            if len(batch.local_LCHW):  # a recipe may have no local crops
                crops, masks = [*crops, batch.local_LCHW], [*masks, None]
            tokens = student.backbone.tokens(crops, masks)  # of all crops in one pass
            global_MTC = tokens[0]
            class_SC = torch.cat([crop_MTC[:, 0] for crop_MTC in tokens])
            class_SD = student.dino_head(class_SC)
            patch_ND = student.ibot_head(_patches(global_MTC, batch.hidden_N))
        tau = train.student_temperature
        dino, local_loss, global_loss = dino_loss(
            self._rows(class_SD), student.dino_head.prototypes.weight, dino_MK, batch.images, tau, self.policy
        )
        del dino_MK  # N x K: freed before the targets of iBOT are computed
        ibot_NK = self._targets(teacher.ibot_head, ibot_ND, temperature)
        weights_N = patch_weights(batch.masks_MP, batch.hidden_N)
        prototypes_KD = student.ibot_head.prototypes.weight
        ibot, _ = target_cross_entropy(self._rows(patch_ND), prototypes_KD, ibot_NK, weights_N, tau, policy=self.policy)
        koleo = koleo_loss(global_MTC[:, 0], GLOBALS, train.group)
        seen = {"loss_local": local_loss, "loss_global": global_loss, "loss_ibot": ibot, "loss_koleo": koleo}
        total = train.dino * dino + train.koleo * koleo + train.ibot * ibot
        self._seen.append({name: value.detach() for name, value in seen.items()})
        return total

    def _targets(self, head: Head, x_ND: Tensor, temperature: float) -> Tensor:
        """Compute the teacher's targets, in float32 for any dtype of the logits."""
        rows_ND = self._rows(x_ND)
        logits_NK = rows_ND @ head.prototypes.weight.to(rows_ND.dtype).t()
        return sinkhorn_targets(logits_NK, temperature, self.recipe.train.sinkhorn_iterations, self.policy)

    def _rows(self, x_ND: Tensor) -> Tensor:
        """Cast the input of the prototypes to bf16 if the run computes in it."""
        return x_ND.bfloat16() if self.policy.bf16 else x_ND

    def learning_rate_multiplier(self, step: int) -> float:
        return rate_multiplier(self.recipe.schedule, peak_rate(self.recipe), step, self.steps)

    def after_step(self, step: int) -> None:
        start, end = self.recipe.schedule.teacher_momentum
        self.model.update_teacher(half_cosine(start, end, step, self.steps))

    def update_metrics(self) -> dict[str, Tensor]:
        """Return the means over the micro-steps of this process."""
        seen, self._seen = self._seen, []
        return {name: torch.stack([part[name] for part in seen]).mean() for name in seen[0]}

    @torch.no_grad()
    def validate(self, stop_if_asked: Callable[[], None]) -> dict[str, float]:
        """Return the k-NN accuracy of the teacher's class token, as DINOv3 votes, without fitting anything.

        Shapes: N training and Q held-out images.
        """
        section, device = self.recipe.validation, self.world.device
        keys, queries = spread(self.data.train, NEIGHBOUR_KEYS), spread(self.data.validation, section.images)
        with self.policy.autocast():
            keys_NC, queries_QC = (self.class_tokens(part, stop_if_asked) for part in (keys, queries))
        labels_N, labels_Q = (torch.from_numpy(part.labels).to(device) for part in (keys, queries))
        k, unit_keys_NC = min(section.neighbours, len(keys)), F.normalize(keys_NC, dim=1)
        predicted_Q = classify(queries_QC, unit_keys_NC, labels_N, len(keys.classes), [k], VOTE_TEMPERATURE)[k]
        return {"validation_knn": float((predicted_Q == labels_Q).float().mean())}

    def class_tokens(self, images: ImageSet, stop_if_asked: Callable[[], None] | None = None) -> Tensor:
        """Return the class tokens of all images on every process; each computes some of them."""
        recipe, backbone, world = self.recipe, self.model.teacher.backbone, self.world
        tokens_NC = torch.zeros(len(images), backbone.width, device=world.device)
        batches = evaluation_batches(
            images,
            recipe.data,
            recipe.data.crops.global_size,
            world,
            recipe.validation.batch or recipe.train.micro_batch,
            workers=self._loader.workers,
            pads=self.policy.compiles,
            stop_if_asked=stop_if_asked,
        )
        for rows, images_BCHW, _ in batches:
            tokens_NC[rows.start : rows.stop] = backbone(images_BCHW)[: len(rows)].float()
        if world.size > 1:
            dist.all_reduce(tokens_NC)  # each row is zero on all ranks but one, so the sum gathers them
        return tokens_NC

    def plan_facts(self) -> PlanFacts:
        recipe, crops, patch = self.recipe, self.recipe.data.crops, self.recipe.model.patch
        global_tokens, local_tokens = ((size // patch) ** 2 + 1 for size in (crops.global_size, crops.local_size))
        tokens, images = GLOBALS * global_tokens + crops.locals * local_tokens, recipe.steps * recipe.train.batch
        return PlanFacts(
            steps=recipe.steps,
            epochs=recipe.steps / recipe.schedule.epoch_steps,
            data=recipe.data.train,
            example="images",
            unit="image",
            read_seconds=seconds_to_read([crops.global_size] * GLOBALS + [crops.local_size] * crops.locals),
            values={"images": images, "tokens_per_image": tokens},
        )


def spread(images: ImageSet, most: int) -> ImageSet:
    if len(images) <= most:
        return images
    return ImageSubset(images, np.linspace(0, len(images) - 1, most).astype(np.int64))


def _patches(tokens_MTC: Tensor, places_N: Tensor) -> Tensor:
    """Select tokens of patches by their indices among all M P; each image has a class token before its P patches."""
    patches = tokens_MTC.shape[1] - 1
    return tokens_MTC.flatten(0, 1)[places_N + places_N // patches + 1]
