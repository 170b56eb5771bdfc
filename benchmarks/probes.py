"""The probes of frozen features: 13 learning rates against one, and k-NN of 10,000 x 10,000 features of width 384.

A step of the linear probe is that of a run: images through a frozen ViT, then the update of the classifiers. The
plain method trains one rate after the other and recomputes the features for each.
"""

import resource
import time

import torch
import torch.nn.functional as F
from measure import alternate, mebibytes, peak_bytes

from lapcli.evaluation.features import Backbone, class_token_and_mean_patch
from lapcli.evaluation.image_tasks import LinearProbes
from lapcli.evaluation.tasks import LinearProtocol
from lapcli.measures.accuracy import KEYS_AT_ONCE, QUERIES_AT_ONCE, classify
from lapcli.models.vit import build_vit
from lapcli.recipe.vision import ViTModel

TARGET_COST = 1.5
CPU = torch.device("cpu")


def bench_linear(image: int, patch: int, layers: int, classes: int, batch: int) -> None:
    """Width 384, as ViT-S."""
    rates = LinearProtocol().rates
    model = build_vit(ViTModel(layers=layers, width=384, heads=6, image=image, patch=patch, classes=10), 0)
    backbone = Backbone(model, name="bench", mean=(0.5,) * 3, std=(0.25,) * 3, device=CPU, image=image)
    images_BCHW = torch.randint(256, (batch, 3, image, image), dtype=torch.uint8)
    labels_B = torch.randint(classes, (batch,))
    probes = {
        count: LinearProbes(768, classes, rates[:count], steps=10**6, seed=0, device=CPU) for count in (1, len(rates))
    }

    def step(count: int) -> None:
        probes[count].step(class_token_and_mean_patch(*backbone(images_BCHW)), labels_B)

    features_BD = class_token_and_mean_patch(*backbone(images_BCHW))
    seconds = alternate(
        {
            "1 rate": lambda: step(1),
            "13 rates": lambda: step(len(rates)),
            "update of 1": lambda: probes[1].step(features_BD, labels_B),
            "update of 13": lambda: probes[len(rates)].step(features_BD, labels_B),
        },
        rounds=7,
    )
    ratio, plain = seconds["13 rates"] / seconds["1 rate"], 13 * seconds["1 rate"] / seconds["13 rates"]
    print(
        f"linear probe, {image} pixels, {layers} layers, {classes} classes, batch {batch}: "
        f"13 rates {seconds['13 rates'] * 1e3:.0f} ms, 1 rate {seconds['1 rate'] * 1e3:.0f} ms, "
        f"ratio {ratio:.3f} (target: at most {TARGET_COST}); one rate after the other takes {plain:.1f} times as long; "
        f"the updates alone {seconds['update of 13'] * 1e3:.0f} and {seconds['update of 1'] * 1e3:.0f} ms"
    )


def bench_knn(count: int = 10_000, width: int = 384, classes: int = 1000) -> None:
    generator = torch.Generator().manual_seed(0)
    keys_ND, queries_QD = (torch.randn(count, width, generator=generator) for _ in range(2))
    labels_N = torch.randint(classes, (count,), generator=generator)

    def run() -> None:
        classify(queries_QD, F.normalize(keys_ND, dim=1), labels_N, classes, (10, 20, 100, 200), 0.07)

    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    run()
    seconds, cpu = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_utime - used
    peak = peak_bytes(run)
    print(
        f"k-NN, {count:,} x {count:,} features of width {width}, {torch.get_num_threads()} threads: {seconds:.1f} s "
        f"({cpu:.1f} s of CPU); peak {mebibytes(peak)}, of which normalised copies {mebibytes(2 * 4 * count * width)}; "
        f"all similarities at once would be {mebibytes(4 * count * count)}, "
        f"a chunk of {QUERIES_AT_ONCE} x {min(count, KEYS_AT_ONCE):,} is "
        f"{mebibytes(4 * QUERIES_AT_ONCE * min(count, KEYS_AT_ONCE))}"
    )


if __name__ == "__main__":
    bench_linear(image=32, patch=4, layers=2, classes=100, batch=64)
    bench_linear(image=224, patch=16, layers=12, classes=1000, batch=4)
    bench_knn()
