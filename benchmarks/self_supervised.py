"""Self-supervised training: our step against a plain one, and the paper's ViT-S at full size.

The plain step passes each crop size through the network separately and stores every matrix of samples and prototypes
completely: Q of Sinkhorn-Knopp, the student's logits and log-probabilities. Both start from the same weights and see
the same batch; the losses must agree. The loader is compared with one whose workers also apply the colours, instead of
the device: both read the same photographs, in turns. `python benchmarks/self_supervised.py [step|loader|real]` runs one
part.
"""

import io
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from measure import alternate, mebibytes, peak_bytes, peak_rss
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision import transforms as T

from lapcli.data.images.colours import Recolouring
from lapcli.data.images.crops import CropReader
from lapcli.data.images.image_set import ImageSet
from lapcli.data.images.loader import Example, seed_everything
from lapcli.data.images.sources import open_images
from lapcli.objectives.dino_losses import koleo_loss, patch_weights
from lapcli.objectives.self_supervised import CropBatch, SelfSupervised
from lapcli.recipe import load_recipe
from lapcli.runtime.ranks import World
from lapcli.training.optimizers import Optimizers

RECIPES = Path(__file__).parent.parent / "recipes"
PROTOTYPES = 16_384
TARGET_TIME, TARGET_MEMORY = 1.0, 0.5
TARGET_LOADER = 2.5


def plain_targets(logits_NK: Tensor, temperature: float) -> Tensor:
    Q = torch.exp(logits_NK / temperature).t()
    K, N = Q.shape
    Q = Q / Q.sum()
    for _ in range(3):
        Q = Q / Q.sum(1, keepdim=True) / K
        Q = Q / Q.sum(0, keepdim=True) / N
    return (Q * N).t()


def plain_loss(objective: SelfSupervised, batch: CropBatch) -> Tensor:
    student, teacher = objective.model.student, objective.model.teacher
    train = objective.recipe.train
    temperature, B = objective.teacher_temperature(batch.step), batch.images
    with torch.no_grad():
        seen = teacher.backbone.tokens([batch.global_MCHW])[0]
        dino = plain_targets(teacher.dino_head.prototypes(teacher.dino_head(seen[:, 0])), temperature)
        ibot = plain_targets(teacher.ibot_head.prototypes(teacher.ibot_head(seen[:, 1:][batch.masks_MP])), temperature)
    whole = student.backbone.tokens([batch.global_MCHW], [batch.masks_MP])[0]
    small = student.backbone.tokens([batch.local_LCHW])[0]
    logits = [student.dino_head.prototypes(student.dino_head(tokens[:, 0])) for tokens in (whole, small)]
    likely_global, likely_local = (
        F.log_softmax(z / train.student_temperature, -1).unflatten(0, (-1, B)) for z in logits
    )
    targets = dino.unflatten(0, (2, B))
    local = -torch.einsum("tbk,sbk->", targets, likely_local) / (B * 2 * len(likely_local))
    among = -(targets * likely_global.flip(0)).sum() / (B * 2)
    pairs = 2 * len(likely_local)
    patches = student.ibot_head.prototypes(student.ibot_head(whole[:, 1:][batch.masks_MP]))
    each = -(ibot * F.log_softmax(patches / train.student_temperature, -1)).sum(-1)
    koleo = koleo_loss(whole[:, 0], 2, train.group)
    return (
        train.dino * (pairs * local + 2 * among) / (pairs + 2)
        + train.koleo * koleo
        + train.ibot * (each * patch_weights(batch.masks_MP, batch.hidden_N)).sum()
    )


def build(recipe_name: str, overrides: list[str]) -> SelfSupervised:
    recipe = load_recipe(RECIPES / recipe_name, overrides)
    objective, world = SelfSupervised(recipe), World(0, 1, torch.device("cpu"))  # type: ignore[arg-type]
    objective.use(open_images(objective.recipe.data, None), world)
    objective.build(world.device)
    return objective


def step_of(objective: SelfSupervised, loss: Callable[[CropBatch], Tensor], batch: CropBatch) -> Callable[[], float]:
    """Loss, gradients, update, teacher; as in the loop, without clipping."""
    optimizers = Optimizers(objective.parameter_groups())
    optimizers.set_rates(0.1)

    def step() -> float:
        value = loss(batch)
        value.backward()
        optimizers.step()
        optimizers.zero_grad()
        objective.after_step(batch.step)
        objective._seen.clear()
        return float(value.detach())

    return step


def bench_step() -> None:
    sizes = [f"model.head.{name}_prototypes={PROTOTYPES}" for name in ("dino", "ibot")]
    ours, plain = (build("dino_quickstart.yaml", [*sizes, "train.compile=false"]) for _ in range(2))
    batch = ours.batch(0, 0)
    first = float(ours.loss(batch).detach()), float(plain_loss(plain, batch).detach())
    steps = {
        "plain": step_of(plain, lambda given: plain_loss(plain, given), batch),
        "ours": step_of(ours, ours.loss, batch),
    }
    seconds = alternate(steps, rounds=5, warmup=2)
    memory = {name: peak_bytes(step) for name, step in steps.items()}
    print(f"training step of the quickstart with {PROTOTYPES:,} prototypes, {torch.get_num_threads()} threads")
    print(f"first loss: ours {first[0]:.5f}, plain {first[1]:.5f}")
    for name in steps:
        print(
            f"  {name:<8}{seconds[name] * 1e3:>8.0f} ms{seconds[name] / seconds['plain']:>7.2f}"
            f"{mebibytes(memory[name]):>14}{memory[name] / memory['plain']:>7.2f}"
        )
    print(f"target for ours: time at most {TARGET_TIME}, peak memory at most {TARGET_MEMORY}")


def bench_real() -> None:
    """One complete step of two images, 2 global and 8 local crops, 65,536 prototypes, 5 of 6 heads Laplacian."""
    before = peak_rss()
    small = ["train.batch=2", "train.micro_batch=2", "train.group=2", "data.train=builtin:photographs"]
    objective = build("dino_vits_5L.yaml", [*small, "train.compile=false"])
    batch = objective.batch(0, 0)
    step = step_of(objective, objective.loss, batch)
    counts = {
        name: sum(p.numel() for p in part.parameters()) for name, part in objective.model.student.named_children()
    }
    for _ in range(2):  # the first touches its memory for the first time
        start = time.perf_counter()
        loss = step()
        seconds = time.perf_counter() - start
        print(f"step of {batch.images} images: loss {loss:.3f}, {seconds:.1f} s")
    shown = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print(f"{shown}; {len(batch.local_LCHW)} local crops, {int(batch.masks_MP.sum())} masked patches")
    print(f"peak memory {mebibytes(peak_rss())} ({mebibytes(before)} before)")


class Photographs(ImageSet):
    """Sixteen JPEG files of 500 x 375 pixels, cut from scikit-learn's photographs, in memory."""

    def __init__(self) -> None:
        self._files = []
        for number, place in enumerate(np.linspace(0, 50, 8).astype(int).repeat(2)):
            whole = Image.fromarray(load_sample_images().images[number % 2])
            file = io.BytesIO()
            whole.crop((place, place, place + 500, place + 375)).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())
        super().__init__(np.zeros(len(self._files)), ["any"])

    def encoded(self, index: int) -> bytes:
        return self._files[index]

    def name(self, index: int) -> str:
        return f"photograph {index}"


def pillow_transform(size: int, scale: Sequence[float], blur: float, solarise: float) -> T.Compose:
    return T.Compose(
        [
            T.RandomResizedCrop(size, (scale[0], scale[1]), interpolation=T.InterpolationMode.BICUBIC),
            T.RandomHorizontalFlip(0.5),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            T.RandomGrayscale(0.2),
            T.RandomApply([T.GaussianBlur(9, (0.1, 2.0))], blur),
            T.RandomSolarize(128, solarise),
        ]
    )


def bench_loader() -> None:
    """CPU time of reading and cropping the paper's crops, 2 of 224 and 8 of 96 pixels, on one core."""
    torch.set_num_threads(1)
    recipe = load_recipe(RECIPES / "dino_vits.yaml")
    crops, images = recipe.data.crops, Photographs()  # type: ignore[union-attr]
    examples = [Example(0, index, 0) for index in range(len(images))]
    reader = CropReader(images, recipe.data, 0)  # type: ignore[arg-type]
    first = pillow_transform(crops.global_size, crops.global_scale, 0.0, 0.0)
    second = pillow_transform(crops.global_size, crops.global_scale, 0.9, 0.2)
    local = pillow_transform(crops.local_size, crops.local_scale, 0.5, 0.0)

    def everything() -> None:
        whole = np.empty((2, len(images), 3, crops.global_size, crops.global_size), dtype=np.uint8)
        small = np.empty((crops.locals, len(images), 3, crops.local_size, crops.local_size), dtype=np.uint8)
        for row in range(len(images)):
            image = images.image(row)
            seed_everything(0, 0, row, 0)
            for crop, transform in enumerate((first, second)):
                whole[crop, row] = np.asarray(transform(image)).transpose(2, 0, 1)
            for crop in range(crops.locals):
                small[crop, row] = np.asarray(local(image)).transpose(2, 0, 1)

    rates: dict[str, list[float]] = {"everything in the worker": [], "ours": []}
    for _ in range(6):
        for name, run in zip(rates, (everything, lambda: reader.read(examples)), strict=True):
            started = time.process_time()
            run()
            rates[name].append(len(images) / (time.process_time() - started))
    print("crops of photographs of 500 x 375 pixels, images per second and core, medians and ranges of 6 turns")
    for name, found in rates.items():
        print(f"  {name:<26}{statistics.median(found):>7.0f}   {min(found):.0f} to {max(found):.0f}")
    before, ours = (statistics.median(found) for found in rates.values())
    print(f"  ratio {ours / before:.2f}; target: at least {TARGET_LOADER}")
    read, recolour = reader.read(examples), Recolouring(recipe.data)  # type: ignore[arg-type]
    started = time.process_time()
    for crops_NHWC, drawn_NK in zip(read[:2], read[2:], strict=True):
        recolour(crops_NHWC.flatten(0, 1), drawn_NK.flatten(0, 1))
    print(f"  the rest, were it on a CPU: {len(images) / (time.process_time() - started):.0f} images a second and core")


PARTS = {"step": bench_step, "loader": bench_loader, "real": bench_real}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
