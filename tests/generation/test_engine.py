"""Generation with a cache against a full forward for every token."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.generation.engine import Engine, RowCache, Sampling
from lapcli.models.gpt import GPT, GPTConfig, KVCache

torch.set_num_threads(1)

PROMPT = [3, 17, 5, 9]
PROMPTS = [[3, 17, 5, 9], [1], [30, 2, 2, 8, 11, 39, 4, 0, 6], [7, 7], [3, 17, 5, 9, 9], [12] * 7]


def randomised(laplacian_heads=2, *, seed=0, **changes) -> GPT:
    config = {"layers": 2, "heads": 4, "width": 32, "vocab": 40, "context": 16, **changes}
    model = GPT(GPTConfig(**config, laplacian_heads=laplacian_heads))
    generator = torch.Generator().manual_seed(seed)
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
def test_greedy_takes_the_argmax_of_the_full_forward(laplacian_heads, kv_heads) -> None:
    plain, turned = (randomised(k, kv_heads=kv_heads)(torch.tensor([PROMPT])) for k in (0, 4))
    assert (plain - turned).abs().max() > 0.1
    model = randomised(laplacian_heads, kv_heads=kv_heads)
    assert Engine(model).complete([PROMPT], Sampling(20)) == [[likeliest(model, PROMPT, 20)]]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_incremental_decoding_equals_the_full_forward(data) -> None:
    """Any head plan, grouped keys, rows of different lengths, rows that leave and rows that join."""
    groups = data.draw(st.sampled_from([1, 2, 4]), "groups")
    plan = data.draw(st.lists(st.integers(0, 4), min_size=2, max_size=2), "plan")
    model = randomised(plan, seed=data.draw(st.integers(0, 5), "seed"), kv_heads=groups)
    token = st.integers(0, 39)
    cache = RowCache(model.config, 4, torch.float32, "cpu")
    rows: list[list[int]] = []
    with torch.inference_mode():
        for _ in range(data.draw(st.integers(1, 8), "steps")):
            while len(rows) < 4 and (not rows or data.draw(st.booleans(), "join")):
                prompt = data.draw(st.lists(token, min_size=1, max_size=9), "prompt")
                prefix = KVCache(model.config, 1, len(prompt), torch.float32, "cpu")
                model.hidden(torch.tensor([prompt]), prefix)
                cache.add(prefix)
                rows.append(prompt)
            new = [data.draw(token, "token") for _ in rows]
            logits_BV = model(torch.tensor(new)[:, None], cache)[:, -1]
            rows = [[*row, id_] for row, id_ in zip(rows, new, strict=True)]
            for row, logits_V in zip(rows, logits_BV, strict=True):
                whole_V = model(torch.tensor([row]))[0, -1]
                assert (logits_V - whole_V).abs().max() < 1e-5
            if len(rows) > 1 and data.draw(st.booleans(), "leave"):
                place = data.draw(st.integers(0, len(rows) - 1), "place")
                cache.remove(place)
                rows[place] = rows[-1]
                rows.pop()


@pytest.mark.parametrize(
    ("laplacian_heads", "kv_heads", "temperature"), [(0, None, 1.5), (3, 2, 1.5), (4, None, 1.5), (3, None, 0.0)]
)
def test_results_do_not_depend_on_the_batch_size(laplacian_heads, kv_heads, temperature) -> None:
    model = randomised(laplacian_heads, kv_heads=kv_heads)
    sampling = Sampling(16, temperature, top_k=20, seed=5)
    by_size = [Engine(model, batch=size).complete(PROMPTS, sampling, samples=3) for size in (1, 3, 8)]
    assert by_size[0] == by_size[1] == by_size[2]
    alone = [Engine(model).complete([prompt], sampling, samples=3)[0] for prompt in PROMPTS]
    assert alone == by_size[0]


@pytest.mark.parametrize("top_k", [3, None])
def test_draws_follow_the_probabilities(top_k) -> None:
    """1,000 first tokens with temperature 2: each fraction within four standard deviations."""
    model = randomised()
    logits = model(torch.tensor([PROMPT]))[0, -1]
    values, ids = logits.topk(top_k or len(logits))
    expected = dict(zip(ids.tolist(), (values / 2).softmax(0).tolist(), strict=True))
    completions = Engine(model).complete([PROMPT], Sampling(1, 2.0, top_k, seed=1), samples=1000)[0]
    drawn = [completion[0] for completion in completions]
    assert set(drawn) <= set(expected)
    for id_, p in expected.items():
        assert abs(drawn.count(id_) / 1000 - p) < 4 * (p * (1 - p) / 1000) ** 0.5 + 1e-3


class Scripted(GPT):
    """Each token has one successor; other computations only update the cache."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.rows_of_steps: list[int] = []

    def hidden(self, tokens_BT, cache=None):  # the tokens themselves stand for their hidden states
        self.rows_of_steps.append(len(cache.lengths) if isinstance(cache, RowCache) else 0)
        super().hidden(tokens_BT, cache)
        return tokens_BT[..., None]

    def logits(self, x):
        return torch.nn.functional.one_hot(self.following[x[:, 0]], self.config.vocab).float()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a"], 265, max_chars=10, crop=10)


def chain(tokenizer, model_tokens: list[int]) -> Scripted:
    """A model in which each token has one successor: the next of `model_tokens`."""
    model = Scripted(GPTConfig(layers=1, heads=2, width=8, vocab=tokenizer.vocab_size, context=64))
    model.following = torch.full((tokenizer.vocab_size,), tokenizer.special("<|assistant_end|>"))
    for token, after in pairwise(model_tokens):
        model.following[token] = after
    return model


def test_the_calculator_answers_and_its_output_is_forced(tokenizer) -> None:
    start, end, out, out_end, assistant, done = (
        tokenizer.special(f"<|{name}|>")
        for name in ("python_start", "python_end", "output_start", "output_end", "assistant_start", "assistant_end")
    )
    call = tokenizer.encode("6*7")
    # After its own call the model would continue with "!"; the forced tokens come first, then their continuation.
    model = chain(tokenizer, [assistant, start, *call, end, ord("!")])
    model.following[out_end] = ord(".")
    model.following[ord(".")] = done
    completion = Engine(model, tokenizer).complete([[tokenizer.bos, assistant]], Sampling(50))[0][0]
    forced = [out, *tokenizer.encode("42"), out_end]
    assert completion == [start, *call, end, *forced, ord(".")]
    # An invalid expression forces no tokens.
    model = chain(tokenizer, [assistant, start, ord("x"), end, ord("!")])
    assert Engine(model, tokenizer).complete([[assistant]], Sampling(50)) == [[[start, ord("x"), end, ord("!")]]]


def test_finished_rows_leave_the_batch(tokenizer) -> None:
    """Prompt n generates n tokens: the rows of all steps add up to the tokens, and the batch shrinks."""
    prompts = [[50 - n] for n in (1, 2, 3, 8)]  # a token counts up to 50, then the answer ends
    model = chain(tokenizer, list(range(1, 51)))
    completions = Engine(model, tokenizer, batch=4).complete(prompts, Sampling(20))
    assert [len(samples[0]) for samples in completions] == [1, 2, 3, 8]
    steps = [rows for rows in model.rows_of_steps if rows]
    # The first token of each row comes from its prompt; the end token is one more.
    assert steps == [4, 3, 2, 1, 1, 1, 1, 1]
    # Waiting rows replace finished rows.
    model.rows_of_steps.clear()
    Engine(model, tokenizer, batch=2).complete([[50 - n] for n in (8, 1, 1, 1, 1)], Sampling(20))
    assert [rows for rows in model.rows_of_steps if rows] == [2, 2, 2, 2, 1, 1, 1, 1]
