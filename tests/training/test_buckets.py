"""Into how many graphs DDP cuts a compiled model: by torch's own cutting, for the paper's GPT without storage."""

import pytest
import torch
from counting_support import Graphs
from torch._dynamo.backends.distributed import DDPOptimizer

from lapcli.models.gpt import GPT, GPTConfig
from lapcli.training.loop import bucket_megabytes


def graphs_of(model: GPT, megabytes: int) -> int:
    torch.compiler.reset()
    graphs = Graphs()
    optimizer = DDPOptimizer(bucket_bytes_cap=megabytes * 2**20, backend_compile_fn=graphs)  # type: ignore[arg-type]
    hidden = torch.compile(model.hidden, backend=optimizer.compile_fn, dynamic=False)
    hidden(torch.zeros(1, 8, dtype=torch.long, device="meta"))
    return len(graphs)


@pytest.mark.slow
def test_twenty_layers_are_few_graphs() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=20, heads=10, width=1280, vocab=65_536, context=2048, laplacian_heads=5))
    assert bucket_megabytes(model) == 268  # 2.24 GB in eight
    few, many = (graphs_of(model, megabytes) for megabytes in (bucket_megabytes(model), 25))
    assert few <= 7
    assert many >= 40


def test_small_models_have_the_buckets_of_ddp() -> None:
    assert bucket_megabytes(torch.nn.Linear(1000, 1000)) == 25
    frozen = torch.nn.Linear(20_000, 20_000, device="meta").requires_grad_(False)
    assert bucket_megabytes(frozen) == 25
    assert bucket_megabytes(torch.nn.Linear(20_000, 20_000, device="meta")) == 191
