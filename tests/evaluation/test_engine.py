"""Generation with a cache against the whole forward for every token."""

import pytest
import torch

from lapcli.evaluation.engine import generate
from lapcli.models.gpt import GPT, GPTConfig

torch.set_num_threads(2)

PROMPT = [3, 17, 5, 9]


def randomised(laplacian_heads=2, **changes) -> GPT:
    config = {"layers": 2, "heads": 4, "width": 32, "vocab": 40, "context": 16, **changes}
    model = GPT(GPTConfig(**config, laplacian_heads=laplacian_heads))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (1.0 if p is model.embed.weight else 0.3))
    return model


def likeliest(model: GPT, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("laplacian_heads", [0, 2, 4, [0, 3]])
def test_greedy_is_the_likeliest_of_the_whole_forward(laplacian_heads, kv_heads) -> None:
    plain, turned = (randomised(k, kv_heads=kv_heads)(torch.tensor([PROMPT])) for k in (0, 4))
    assert (plain - turned).abs().max() > 0.1
    model = randomised(laplacian_heads, kv_heads=kv_heads)
    assert generate(model, PROMPT, 20) == likeliest(model, PROMPT, 20)


def test_the_first_of_the_top_is_greedy() -> None:
    model = randomised()
    greedy = generate(model, PROMPT, 20)
    assert generate(model, PROMPT, 20, temperature=5.0, top_k=1, seed=3) == greedy


def test_a_seed_gives_the_tokens() -> None:
    model = randomised()
    draws = [generate(model, PROMPT, 20, temperature=3.0, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_draws_follow_the_probabilities() -> None:
    """400 first tokens with temperature 2 of the three likeliest: each share within four deviations."""
    model = randomised()
    logits = model(torch.tensor([PROMPT]))[0, -1]
    values, ids = logits.topk(3)
    expected = dict(zip(ids.tolist(), (values / 2).softmax(0).tolist(), strict=True))
    drawn = [generate(model, PROMPT, 1, temperature=2.0, top_k=3, seed=seed)[0] for seed in range(400)]
    assert set(drawn) <= set(expected)
    for id_, p in expected.items():
        assert abs(drawn.count(id_) / 400 - p) < 4 * (p * (1 - p) / 400) ** 0.5


def test_a_top_beyond_the_vocabulary_is_all_of_it() -> None:
    model = randomised()
    all_of_it = generate(model, PROMPT, 5, temperature=1.0, top_k=1000, seed=1)
    assert len(all_of_it) == 5
    assert all(0 <= token < 40 for token in all_of_it)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_as_many_tokens_as_asked(count: int) -> None:
    assert len(generate(randomised(), PROMPT, count)) == count


def test_bf16() -> None:
    model = randomised().use_bf16()
    assert len(generate(model, PROMPT, 8)) == 8
