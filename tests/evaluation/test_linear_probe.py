"""Classifiers trained side by side equal those that torch trains one at a time."""

import pytest
import torch
from torch import nn

from lapcli.evaluation.image_tasks import LinearProbes

RATES = [1e-3, 0.02, 0.1, 1.0]
STEPS, BATCH, WIDTH, CLASSES = 30, 16, 12, 5


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def probes(rates):
    return LinearProbes(WIDTH, CLASSES, rates, steps=STEPS, seed=3, device=torch.device("cpu"))


def test_each_rate_matches_torch_sgd(batches):
    ours = probes(RATES)
    singles = []
    for rate, weight in zip(RATES, [weight.detach().clone() for weight in ours.weights], strict=True):
        layer = nn.Linear(WIDTH, CLASSES)
        layer.weight.data, layer.bias.data = weight, torch.zeros(CLASSES)
        optimizer = torch.optim.SGD(layer.parameters(), lr=rate, momentum=0.9)
        singles.append((layer, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)))
    for features, labels in batches:
        losses = ours.step(features, labels)
        for number, (layer, optimizer, schedule) in enumerate(singles):
            loss = nn.functional.cross_entropy(layer(features), labels)
            assert losses[number].item() == pytest.approx(loss.item(), rel=1e-4)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    for number, (layer, _, _) in enumerate(singles):
        assert torch.allclose(ours.weights[number], layer.weight, rtol=1e-4, atol=1e-5)
        assert torch.allclose(ours.biases[number], layer.bias, rtol=1e-4, atol=1e-5)
        assert torch.allclose(ours.logits(batches[0][0])[:, number], layer(batches[0][0]), rtol=1e-4, atol=1e-4)
