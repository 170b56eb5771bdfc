"""Evaluation on a GPT of the quickstart's size with random weights: ours against a row for each choice and a prefill
for each sample on the same model, and against lm-eval's own HFLM where `transformers` and `accelerate` are installed.

    letters       questions of about 330 tokens, four single-token answers
    answer text   the same contexts, four answers of 20 tokens
    pass@10       prompts of 330 tokens, ten samples of 64 tokens

HFLM runs the same weights through the export's modelling file: it groups letters as we do, computes a row for each
answer text, and a row with a separate prefill for each sample.
"""

import tempfile
from pathlib import Path

import torch
from measure import alternate

from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.evaluation.likelihood import Question, score
from lapcli.generation.engine import Engine, Sampling
from lapcli.models.gpt import GPT, GPTConfig

QUESTIONS, CONTEXT, ANSWER, BATCH = 16, 330, 20, 8
PROMPTS, SAMPLES, TOKENS = 4, 10, 64
ROUNDS = 3
TARGETS = {"letters": 3.0, "answer text": 2.0, "pass@10": 3.0}
SETTINGS = Sampling(TOKENS, temperature=1.0, top_k=50)


def main() -> None:
    torch.manual_seed(0)
    text = " ".join(f"{a}{b}" for a in "bcdfghjklm" for b in ("ara", "eri", "ilo", "ono", "uto")) * 40
    tokenizer = train_tokenizer([text], 320, max_chars=10**6, crop=10**6)
    model = GPT(GPTConfig(layers=4, width=192, heads=4, vocab=3072, context=1024, laplacian_heads=2)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.05)
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(300, (count,), generator=draw).tolist())

    contexts = [ids(CONTEXT + 10 * (number % 4)) for number in range(QUESTIONS)]
    letters = [Question(context, tuple((65 + n,) for n in range(4))) for context in contexts]
    texts = [Question(context, tuple(ids(ANSWER) for _ in range(4))) for context in contexts]
    prompts = contexts[:PROMPTS]
    theirs = _hflm(model, tokenizer) if _has_transformers() else {}
    engine = Engine(model, batch=PROMPTS * SAMPLES)
    for name, ours, naive in (
        ("letters", lambda: list(score(model, letters, BATCH)), lambda: _row_a_choice(model, letters)),
        ("answer text", lambda: list(score(model, texts, BATCH)), lambda: _row_a_choice(model, texts)),
        ("pass@10", lambda: engine.complete(prompts, SETTINGS, SAMPLES), lambda: _prefill_a_sample(model, prompts)),
    ):
        candidates = {"ours": ours, "naive": naive}
        if name in theirs:
            questions = {"letters": letters, "answer text": texts, "pass@10": prompts}[name]
            candidates["HFLM"] = lambda run=theirs[name], given=questions: run(given)
        seconds = alternate(candidates, rounds=ROUNDS)
        line = f"{name:<12}{seconds['ours']:>8.2f} s   naive {seconds['naive'] / seconds['ours']:>5.1f} times as long"
        line += f"   target >= {TARGETS[name]}"
        if "HFLM" in seconds:
            line += f"   HFLM {seconds['HFLM'] / seconds['ours']:>5.1f} times"
        print(line, flush=True)
    if not theirs:
        print("HFLM: not compared; it needs transformers and accelerate")


@torch.inference_mode()
def _row_a_choice(model: GPT, questions: list[Question]) -> None:
    """The usual method: context and choice in one row, logits of all positions."""
    rows = [(question.context, choice) for question in questions for choice in question.continuations]
    rows.sort(key=lambda row: -len(row[0]) - len(row[1]))
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        longest = max(len(context) + len(choice) for context, choice in part)
        tokens_BT = torch.zeros(len(part), longest, dtype=torch.long)
        for row, (context, choice) in enumerate(part):
            tokens_BT[row, : len(context) + len(choice)] = torch.tensor([*context, *choice])
        logits_BTV = model(tokens_BT).log_softmax(-1)
        for row, (context, choice) in enumerate(part):
            places = range(len(context) - 1, len(context) + len(choice) - 1)
            float(logits_BTV[row, list(places), list(choice)].sum())


def _prefill_a_sample(model: GPT, prompts: list[tuple[int, ...]]) -> None:
    engine = Engine(model, batch=1)
    for prompt in prompts:
        for seed in range(SAMPLES):
            engine.complete([prompt], Sampling(TOKENS, temperature=1.0, top_k=50, seed=seed))


def _has_transformers() -> bool:
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def _hflm(model: GPT, tokenizer):  # type: ignore[no-untyped-def]
    """The calls that lm-eval makes to HFLM, without texts: the tokens are the same as ours."""
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from lapcli.export.modeling_lap import LapConfig, LapForCausalLM

    c = model.config
    config = LapConfig(
        vocab_size=c.vocab,
        hidden_size=c.width,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.groups,
        max_position_embeddings=c.context,
        final_logit_softcapping=c.softcap,
        laplacian_heads=list(c.head_plan().per_layer),
        rotary_base=c.rotary_base,
        rotary_precision=c.rotary_precision,
        tie_word_embeddings=False,
    )
    exported = LapForCausalLM(config).eval()
    exported.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        words = PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", bos_token="<|bos|>", eos_token="<|bos|>", pad_token="<|bos|>"
        )
    lm = HFLM(pretrained=exported, tokenizer=words, backend="causal", max_length=c.context, batch_size=BATCH)

    def likelihoods(questions: list[Question]) -> None:
        requests = [(("c", "a"), list(q.context), list(choice)) for q in questions for choice in q.continuations]
        lm._loglikelihood_tokens(requests, disable_tqdm=True)

    def generate(prompts: list[tuple[int, ...]]) -> None:
        for prompt in prompts:  # lm-eval's repeats are rows of a batch
            rows_BT = torch.tensor([prompt] * SAMPLES)
            lm._model_generate(
                rows_BT,
                max_length=len(prompt) + TOKENS,
                stop=[],
                attention_mask=torch.ones_like(rows_BT),
                do_sample=True,
                temperature=1.0,
                top_k=50,
                eos_token_id=None,
            )

    return {"letters": likelihoods, "answer text": likelihoods, "pass@10": generate}


if __name__ == "__main__":
    main()
