"""Checkpoints of nanochat as runs. The reference forward follows nanochat's formulas, from its tensors."""

import io
import json
import pickle

import numpy as np
import pytest
import rustbpe
import tiktoken
import torch
import torch.nn.functional as F
from support import run_main, tiny_chat_recipe

from lapcli.data.text.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN
from lapcli.objectives.nanochat import import_checkpoint, read_tokenizer
from lapcli.objectives.weights import find_checkpoint as checkpoint_of
from lapcli.objectives.weights import open_run
from lapcli.recipe import recipe_to_yaml
from lapcli.runs import read_run
from lapcli.runtime.errors import DataError

TEXTS = [
    "It's the tea that won't stew. 12345 你好\r\n\n  naïve\tUBER-graph",
    "abcabc bcabca  cababc <|bos|> \U0001f600",
]
LAYERS, HEADS, KV_HEADS, WIDTH, CONTEXT, VOCAB = 3, 4, 2, 32, 24, 300


@pytest.fixture(scope="module")
def encoding():
    """As saved by nanochat's tokenizer script."""
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(TEXTS * 20), VOCAB - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    return tiktoken.Encoding("rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def write_checkpoint(base, encoding, folder="base_checkpoints", laplacian_heads=None, step=7, meta=None, **more):
    """What nanochat leaves; the vocabulary padded to a multiple of 64, the embedding in bf16."""
    generator = torch.Generator().manual_seed(step)
    padded, size = -(-VOCAB // 64) * 64, WIDTH // HEADS

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.2

    state = {"transformer.wte.weight": draw(padded, WIDTH).bfloat16(), "lm_head.weight": draw(padded, WIDTH)}
    for n in range(LAYERS):
        block = f"transformer.h.{n}."
        state |= {
            f"{block}attn.c_q.weight": draw(WIDTH, WIDTH),
            f"{block}attn.c_k.weight": draw(KV_HEADS * size, WIDTH),
            f"{block}attn.c_v.weight": draw(KV_HEADS * size, WIDTH),
            f"{block}attn.c_proj.weight": draw(WIDTH, WIDTH),
            f"{block}mlp.c_fc.weight": draw(4 * WIDTH, WIDTH),
            f"{block}mlp.c_proj.weight": draw(WIDTH, 4 * WIDTH),
        }
    place = base / folder / "d3"
    place.mkdir(parents=True)
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in state.items()} | more, place / f"model_{step:06d}.pt")
    settings = {"sequence_len": CONTEXT, "vocab_size": VOCAB, "n_layer": LAYERS, "n_head": HEADS}
    settings |= {"n_kv_head": KV_HEADS, "n_embd": WIDTH}
    if laplacian_heads is not None:
        settings["laplacian_heads"] = laplacian_heads
    content = {"step": step, "val_bpb": 1.5, "model_config": settings, "user_config": {"device_batch_size": 4}}
    (place / f"meta_{step:06d}.json").write_text(json.dumps({**content, **(meta or {})}))
    (base / "tokenizer").mkdir(exist_ok=True)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    return place, state


def nanochat_logits(state, tokens_BT, laplacian_heads):
    """nanochat's forward with explicit attention matrices, in float64 except the bf16 rotary tables."""
    B, T = tokens_BT.shape
    D = WIDTH // HEADS
    w = {name: tensor.double() for name, tensor in state.items()}

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    angles = torch.outer(torch.arange(T).float(), 1.0 / (10000 ** (torch.arange(0, D, 2).float() / D)))
    cos, sin = angles.cos().bfloat16().double()[:, None], angles.sin().bfloat16().double()[:, None]

    def rotate(x):
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    x = norm(w["transformer.wte.weight"][tokens_BT])
    for n in range(LAYERS):
        block, h = f"transformer.h.{n}.", norm(x)
        q = norm(rotate((h @ w[f"{block}attn.c_q.weight"].T).view(B, T, HEADS, D)))
        k = norm(rotate((h @ w[f"{block}attn.c_k.weight"].T).view(B, T, KV_HEADS, D)))
        v = (h @ w[f"{block}attn.c_v.weight"].T).view(B, T, KV_HEADS, D)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 2) for each in (k, v))
        scores = torch.einsum("bthd,bshd->bhts", q, k) / D**0.5
        P = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
        laplacian = torch.arange(HEADS) >= HEADS - laplacian_heads[n]
        A = torch.where(laplacian[None, :, None, None], torch.eye(T).double() - P, P)
        x = x + torch.einsum("bhts,bshd->bthd", A, v).reshape(B, T, WIDTH) @ w[f"{block}attn.c_proj.weight"].T
        x = x + F.relu(norm(x) @ w[f"{block}mlp.c_fc.weight"].T).pow(2) @ w[f"{block}mlp.c_proj.weight"].T
    return 15 * torch.tanh((norm(x) @ w["lm_head.weight"].T)[..., :VOCAB] / 15)


@pytest.mark.parametrize("heads", [None, 2, [0, 1, 4]])
def test_an_imported_run_matches_nanochat(tmp_path, encoding, heads):
    place, state = write_checkpoint(tmp_path, encoding, laplacian_heads=heads)
    run, is_new = import_checkpoint(place, tmp_path / "runs", "theirs")
    assert is_new
    assert run.is_finished
    assert run.recipe.model.rotary_precision == "bf16"
    loaded = open_run(run, checkpoint_of(run, "last"), torch.device("cpu"), float32=True)
    tokens = torch.randint(0, VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    per_layer = [0] * LAYERS if heads is None else [heads] * LAYERS if isinstance(heads, int) else heads
    expected = nanochat_logits(state, tokens, per_layer)
    with torch.no_grad():
        assert torch.allclose(loaded.module(tokens).double(), expected, atol=2e-5)
    again, is_new = import_checkpoint(place, tmp_path / "runs", "theirs")
    assert not is_new
    assert again.info == run.info
    assert not list((tmp_path / "runs").glob(".*"))


def test_sft_starts_from_an_imported_checkpoint(tmp_path, encoding, capsys):
    place, _ = write_checkpoint(tmp_path, encoding, laplacian_heads=[0, 1, 4])
    import_checkpoint(place, tmp_path / "runs", "theirs")
    stages = tiny_chat_recipe(tmp_path, midtrain={"train": {"steps": 2}}, sft={"train": {"steps": 2}})
    (tmp_path / "chat.yaml").write_text(recipe_to_yaml(stages))
    command = ["sft", str(tmp_path / "chat.yaml"), "--runs-dir", str(tmp_path / "runs")]
    code, _, err = run_main(capsys, *command, "--run", "theirs", "--name", "imported")
    assert code == 0, err
    imported = read_run(tmp_path / "runs" / "imported-sft")
    assert imported.recipe.model.head_plan().per_layer == (0, 1, 4)
    assert imported.recipe.model.rotary_precision == "bf16"
    asked = ["--prompt", "tea", "--max-tokens", "3"]
    code, _, err = run_main(capsys, "sample", "--run", "imported-sft", *asked, "--runs-dir", str(tmp_path / "runs"))
    assert code == 0, err


def test_the_pickled_tokenizer_matches_tiktoken_ids(tmp_path, encoding, test_data):
    text = (test_data / "text" / "tinyshakespeare.txt").read_text()[:200_000]
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter([text]), 2000, pattern=SPLIT_PATTERN)
    ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
    special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    theirs = tiktoken.Encoding("rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=special)
    generator = np.random.default_rng(0)
    noise = ["".join(generator.choice(list("aeinrst hTHE'l"), size=40)) for _ in range(500)]
    for encoding_, texts in ((theirs, [text, *noise]), (encoding, [*TEXTS, *noise])):
        (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding_))
        ours = read_tokenizer(tmp_path / "tokenizer.pkl")
        assert [ours.encode(each) for each in texts] == [encoding_.encode_ordinary(each) for each in texts]
        assert [ours.special(name) for name in SPECIAL_TOKENS] == [
            encoding_.encode_single_token(name) for name in SPECIAL_TOKENS
        ]


class Hostile:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_hostile_tokenizer_is_refused_and_not_executed(tmp_path, encoding, protocol):
    import os

    path, touched = tmp_path / "tokenizer.pkl", tmp_path / "touched"
    hidden = tiktoken.Encoding("x", pat_str="x", mergeable_ranks={b"a": 0}, special_tokens={"<|bos|>": 1})
    hidden._pat_str = Hostile(os.mkdir, str(touched))
    for content in (
        Hostile(os.mkdir, str(touched)),
        Hostile(eval, f"__import__('os').mkdir({str(touched)!r})"),
        hidden,
    ):
        path.write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(DataError, match=r"not a pickled tiktoken encoding"):
            read_tokenizer(path)
    for content in (b"", b"\x80", pickle.dumps({"mergeable_ranks": 1}), pickle.dumps(encoding)[:-100], b"text"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            read_tokenizer(path)
    assert not touched.exists()


def test_a_hostile_or_foreign_checkpoint_is_refused_and_not_executed(tmp_path, encoding):
    import os

    place, _ = write_checkpoint(tmp_path, encoding)
    file, touched = place / "model_000007.pt", tmp_path / "touched"
    whole = file.read_bytes()
    torch.save({"lm_head.weight": Hostile(os.mkdir, str(touched))}, file)
    with pytest.raises(DataError, match="cannot be read as weights"):
        import_checkpoint(place, tmp_path / "runs", "x")
    assert not touched.exists()
    for content in (whole[: len(whole) // 2], b"", b"not a pickle", pickle.dumps([1, 2])):
        file.write_bytes(content)
        with pytest.raises(DataError, match=r"model_000007.pt .*; download the checkpoint again"):
            import_checkpoint(place, tmp_path / "runs", "x")
    buffer = io.BytesIO()
    torch.save([torch.zeros(2)], buffer)
    file.write_bytes(buffer.getvalue())
    with pytest.raises(DataError, match="does not hold tensors by name"):
        import_checkpoint(place, tmp_path / "runs", "x")
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_the_architecture_of_2026_is_refused_by_its_tensors_and_by_its_settings(tmp_path, encoding):
    lambdas = {"resid_lambdas": torch.ones(3), "value_embeds.1.weight": torch.zeros(4, 4)}
    place, _ = write_checkpoint(tmp_path / "a", encoding, **lambdas)
    with pytest.raises(DataError, match=r"unknown tensors: resid_lambdas, value_embeds\.1\.weight; it is not nano"):
        import_checkpoint(place, tmp_path / "runs", "x")
    # The fork's "vanilla" models have the tensors of 2025 but a different forward: queries and keys are scaled.
    place, _ = write_checkpoint(tmp_path / "b", encoding, laplacian_heads=[1, 1, 1])
    meta = json.loads((place / "meta_000007.json").read_text())
    meta["model_config"] |= {"use_ve": False, "window_pattern": "L"}
    (place / "meta_000007.json").write_text(json.dumps(meta))
    with pytest.raises(DataError, match=r"in model_config: use_ve, window_pattern; .* by 1\.2 .*; name a"):
        import_checkpoint(place, tmp_path / "runs", "x")
    assert not (tmp_path / "runs").exists()


def test_the_command_imports_a_checkpoint_once(tmp_path, encoding, capsys):
    base, _ = write_checkpoint(tmp_path, encoding, laplacian_heads=1)
    chat, _ = write_checkpoint(tmp_path, encoding, "chatsft_checkpoints", step=9)
    places, options = (base, base, chat), ("--to", "base", "--runs-dir", str(tmp_path))
    found = [run_main(capsys, "import", str(place), *options) for place in places]
    assert [code for code, _, _ in found] == [0, 0, 2]
    assert "laplacian_heads 1, rotary tables in bf16" in found[0][1]
    assert "was imported before" in found[1][1]
    assert "is another run" in found[2][2]
