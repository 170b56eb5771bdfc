"""Images: our loader against timm's, the step time of Laplacian heads and of stock timm, and a full-size ViT-B.

All candidates take turns in one process. `python benchmarks/images.py [loader|step|real]` runs one part. The
loader's files are noise written as JPEG of about 500 x 375 pixels (photographs) and 64 x 64 (small images), so that
nothing has to be downloaded.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
from measure import compare, mebibytes, peak_rss
from PIL import Image, ImageFilter
from timm.data import ImageDataset, create_loader
from torch import nn

from lapcli.data.images.augmentation import normalise, training_transform
from lapcli.data.images.image_set import FolderImages
from lapcli.data.images.loader import ImageBatches, ImageLoader, Reader
from lapcli.models.vit import build_vit
from lapcli.recipe.vision import Augmentation, ImageSource, ViTModel

BATCH, WORKERS = 16, 2
POLICIES = {
    "photographs, 3-Augment": ("3a", 0.3, 224, (500, 375), 320),
    "64 px, RandAugment": ("rand-m7-mstd0.5-inc1", None, 64, (64, 64), 1920),
}


def write_images(folder: Path, size: tuple[int, int], count: int) -> None:
    generator = np.random.default_rng(0)
    for number in range(count):
        (folder / f"class{number % 4}").mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (size[1] // 4 + 1, size[0] // 4 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).filter(ImageFilter.SMOOTH)
        image.save(folder / f"class{number % 4}" / f"{number}.jpg", quality=90)


def our_epoch(folder: Path, source: ImageSource, size: int) -> Callable[[], object]:
    images = FolderImages(folder)
    batches = ImageBatches(len(images), batch=BATCH, group=BATCH, repeats=1, seed=0)
    reader = Reader(images, training_transform(source, size), size, 0)

    def run() -> None:
        last = (batches.steps_per_epoch - 1, 0)
        loader = ImageLoader(
            reader, lambda step, _: batches.examples(step, 0, BATCH), micro_steps=1, last=last, workers=WORKERS
        )
        for step in range(batches.steps_per_epoch):
            normalise(loader.batch(step, 0)[0], source)
        loader.close()

    return run


def timm_epoch(folder: Path, source: ImageSource, size: int, prefetch: bool) -> Callable[[], object]:
    wanted = source.augmentation
    loader = create_loader(
        ImageDataset(str(folder)),
        (3, size, size),
        BATCH,
        is_training=True,
        use_prefetcher=prefetch,
        auto_augment=wanted.policy,
        color_jitter=wanted.color_jitter,
        interpolation="bicubic",
        re_prob=0.0,
        num_workers=WORKERS,
        persistent_workers=False,
        device=torch.device("cpu"),
        pin_memory=False,
    )

    def run() -> None:
        for _ in loader:
            pass

    return run


def bench_loader() -> None:
    torch.set_num_threads(1)  # this process only normalises; threads that wait would take the workers' cores
    print(f"loader, {WORKERS} workers, batches of {BATCH}, float32 batches on the CPU; target: ours >= timm's")
    for name, (policy, jitter, size, pixels, count) in POLICIES.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_images(folder, pixels, count)
            source = ImageSource(
                train=str(folder), augmentation=Augmentation(crop="random_resized", policy=policy, color_jitter=jitter)
            )
            times = compare(
                {
                    "timm": partial(timm_epoch, folder, source, size, prefetch=False),
                    "timm, prefetcher": partial(timm_epoch, folder, source, size, prefetch=True),
                    "ours": partial(our_epoch, folder, source, size),
                },
                builds=4,
                rounds=4,
            )
        best = min(times["timm"], times["timm, prefetcher"])
        for candidate, time_ in times.items():
            print(f"  {name:<26}{candidate:<20}{best / time_:>7.2f} of timm's faster one")


def stock_model(section: ViTModel) -> nn.Module:
    return timm.create_model(
        "deit3_base_patch16_224",
        img_size=section.image,
        patch_size=section.patch,
        embed_dim=section.width,
        depth=section.layers,
        num_heads=section.heads,
        num_classes=section.classes,
    )


def train_step(model: nn.Module, section: ViTModel, batch: int) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, section.image, section.image, generator=generator)
    labels = torch.randint(section.classes, (batch,), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bench_step() -> None:
    """Width 384, 6 heads (ViT-S), 2 layers, at the paper's two sequence lengths; one thread, no synchronisation."""
    torch.set_num_threads(1)
    for image, patch, batch in ((32, 4, 8), (224, 16, 2)):
        section = ViTModel(layers=2, width=384, heads=6, image=image, patch=patch, classes=100)
        half = section.model_copy(update={"laplacian_heads": 3})
        times = compare(
            {
                "k = 0": lambda: train_step(build_vit(section, 0), section, batch),  # noqa: B023
                "k = H/2": lambda: train_step(build_vit(half, 0), section, batch),  # noqa: B023
                "stock timm": lambda: train_step(stock_model(section), section, batch),  # noqa: B023
            }
        )
        print(f"training step, {image} pixels, batch {batch}, one thread; target: at most 1.03")
        print(f"  k = H/2 against k = 0: {times['k = H/2']:.3f}")
        for name in ("k = 0", "k = H/2"):
            print(f"  {name} against stock timm: {times[name] / times['stock timm']:.3f}")


def bench_real() -> None:
    """ViT-B with half its heads Laplacian: forward and backward of two images."""
    for image, patch, classes, bf16 in ((224, 16, 1000, False), (32, 4, 100, False), (32, 4, 100, True)):
        section = ViTModel(image=image, patch=patch, classes=classes, laplacian_heads=6, drop_path=0.1)
        model = build_vit(section, 0)
        images, labels = torch.randn(2, 3, image, image), torch.randint(classes, (2,))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        loss.backward()
        seconds = time.perf_counter() - start
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        count = sum(p.numel() for p in model.parameters())
        print(
            f"ViT-B, {count:,} parameters, {image} pixels, {'bf16' if bf16 else 'float32'}: {seconds:.1f} s, "
            f"loss {loss.item():.3f} (ln {classes} = {np.log(classes):.3f}), gradient norm {norm:.3f}, "
            f"peak {mebibytes(peak_rss())}"
        )


PARTS = {"loader": bench_loader, "step": bench_step, "real": bench_real}

if __name__ == "__main__":
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
