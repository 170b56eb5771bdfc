"""Exported GPTs in transformers: the same logits, the same greedy text with every cache, the same tokens."""

import json

import pytest
import torch
from export_support import gpt_run

from lapcli.data.chat.conversation import MessagePart, Turn, conversation, render_prompt
from lapcli.export.export import export_run
from lapcli.generation.engine import Engine, Sampling
from lapcli.objectives.weights import find_checkpoint, open_run

transformers = pytest.importorskip("transformers", reason="the dev extra has it")

PLANS = [
    pytest.param({"laplacian_heads": 0}, id="native"),
    pytest.param({"laplacian_heads": [1, 3]}, id="some heads"),
    pytest.param({"laplacian_heads": 4, "rotary_precision": "bf16"}, id="bf16 tables", marks=pytest.mark.long),
    pytest.param({"laplacian_heads": 0, "rotary_precision": "bf16"}, id="plain, bf16", marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=PLANS)
def pair(request, tmp_path_factory):
    """Our model and tokenizer, and those that transformers loads from the exported folder."""
    run = gpt_run(tmp_path_factory.mktemp("runs"), **request.param)
    loaded = open_run(run, find_checkpoint(run, "last"), torch.device("cpu"), float32=True)
    folder = export_run(run, "hf", verified=False).folder
    is_native = not (folder / "modeling_lap.py").exists()
    assert is_native == (request.param == {"laplacian_heads": 0})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=not is_native)
    return *loaded.language_model(), theirs.eval(), folder


@torch.inference_mode()
def test_logits(pair):
    ours, _, theirs, _ = pair
    tokens = torch.randint(ours.config.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    assert theirs.dtype == torch.float32
    assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=2e-5)
    assert torch.allclose(theirs(tokens, logits_to_keep=1).logits, ours(tokens)[:, -1:], atol=2e-5)


@torch.inference_mode()
def test_greedy_text_with_every_cache_and_padding(pair):
    ours, tokenizer, theirs, _ = pair
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(ours.config.vocab - 9, (length,), generator=generator) for length in (20, 3, 11)]
    pad = theirs.generation_config.pad_token_id
    padded = torch.stack([torch.nn.functional.pad(row, (20 - len(row), 0), value=pad) for row in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (20 - len(row), 0)) for row in prompts])
    ends = {tokenizer.special("<|assistant_end|>"), tokenizer.bos}
    for way in ({}, {"use_cache": False}, {"cache_implementation": "static"}):
        rows = theirs.generate(input_ids=padded, attention_mask=mask, max_new_tokens=12, do_sample=False, **way)
        for prompt, row in zip(prompts, rows[:, 20:].tolist(), strict=True):
            ((expected,),) = Engine(ours).complete([prompt.tolist()], Sampling(12))
            stop = next((n + 1 for n, token in enumerate(expected) if token in ends), 12)
            assert row[:stop] == expected[:stop]
            assert set(row[stop:]) <= {pad}


def test_system_text_and_calculator_calls_keep_our_ids(pair):
    _, tokenizer, _, folder = pair
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    calls = [{"type": "python", "text": "12*3"}, {"type": "python_output", "text": "36"}]
    messages = [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "12 * 3?\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is "}, *calls]},
        {"role": "user", "content": "Thanks"},
    ]
    user, _, last = conversation([*messages[:2], {"role": "assistant", "content": "It is "}, messages[3]])
    answer = [MessagePart("text", "It is "), *(MessagePart(call["type"], call["text"]) for call in calls)]
    expected = render_prompt([user, Turn("assistant", tuple(answer)), last], tokenizer)
    assert ids(theirs, messages, add_generation_prompt=True) == expected
    with pytest.raises(Exception, match="the user first"):
        ids(theirs, [{"role": "assistant", "content": "Hello"}])


def ids(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def test_a_laplacian_model_does_not_load_as_a_plain_one(tmp_path):
    folder = export_run(gpt_run(tmp_path), "hf", verified=False).folder
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    _, report = transformers.NanoChatForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert "model.layers.0.self_attn.q_proj.weight" in report["missing_keys"]


def test_every_stop_token_and_the_chat_end(tmp_path):
    for chat, end in ((True, "<|assistant_end|>"), (False, "<|bos|>")):
        run = gpt_run(tmp_path / str(chat), chat=chat)
        folder = export_run(run, "hf", verified=False).folder
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert tokenizer.eos_token == end
        assert set(tokenizer.convert_ids_to_tokens(stops)) == {"<|assistant_end|>", "<|bos|>"}
        assert tokenizer.pad_token_id not in stops
