"""The adapter's answers to lm-eval requests, with workers that answer by rule instead of a model."""

import copy
import pickle

import pytest
import torch
from harness_support import QUOTING, arc_rows, tiny_model, tiny_tokenizer
from lm_eval import evaluator
from lm_eval.api.instance import Instance

from lapcli.data.chat.conversation import multiple_choice, question_and_answer, read_choices, render_prompt
from lapcli.data.text.tokenizer import train_tokenizer
from lapcli.evaluation.adapter import LapLM, Prompt, Workers, chat_prompt
from lapcli.evaluation.benchmarks import Documents, sampled_definition
from lapcli.evaluation.benchmarks.choices import ARC_EASY
from lapcli.evaluation.benchmarks.numbers import compare_numbers
from lapcli.evaluation.language_tasks import task_over
from lapcli.evaluation.tasks import Sampling as Settings
from lapcli.generation.engine import Engine, Sampling
from lapcli.runtime.errors import DataError
from lapcli.runtime.ranks import World


class Oracle(LapLM):
    """Workers that answer by a rule and record the items."""

    def __init__(self, rule, tokenizer, context, model=None):
        model = model or tiny_model(tokenizer.vocab_size, context=context)
        super().__init__(model, tokenizer, Workers(World(0, 1, torch.device("cpu"))), task="task", seed=0, batch=4)
        self.rule, self.asked = rule, []

    def _scored(self, items):
        self.asked += items
        yield from ((n, self.rule(item)) for n, item in enumerate(items))

    def _generated(self, items, *settings):
        self.asked.append((items, *settings))
        yield from ((n, self.rule(item)) for n, item in enumerate(items))


def oracle(rule=None, tokenizer=None, context=128):
    return Oracle(rule, tokenizer or tiny_tokenizer(), context)


def run(lm, definition, rows):
    tasks = {definition["task"]: task_over(definition, {"test": Documents(rows, {})}, 0)}
    loaded = {"tasks": tasks, "groups": {}, "group_map": {}}
    return evaluator.evaluate(lm=lm, task_dict=loaded, apply_chat_template=True)


def alone(model, tokenizer, batch=4):
    workers = Workers(World(0, 1, torch.device("cpu")))
    return LapLM(model, tokenizer, workers, task="task", seed=0, batch=batch)


def gsm8k(samples=10):
    return sampled_definition("gsm8k", Settings(samples=samples), compare_numbers, "question", "answer")


def test_known_pass_at_1_and_10():
    """3 of 10 correct on even questions, none on odd ones, for five questions."""
    tokenizer = tiny_tokenizer()
    rows = [{"question": f"number {n}", "answer": f"#### {n}", "number": str(n)} for n in range(5)]
    right = {chat_prompt([{"role": "user", "content": row["question"]}], tokenizer).ids: row["number"] for row in rows}

    def rule(ids):
        number = right[ids]
        return [f"so\n#### {number}" if s in (1, 4, 9) and int(number) % 2 == 0 else "#### 77" for s in range(10)]

    results = run(oracle(rule, tokenizer), gsm8k(), rows)
    assert results["results"]["gsm8k"]["pass@1,verdicts"] == pytest.approx(0.3 * 3 / 5)
    assert results["results"]["gsm8k"]["pass@10,verdicts"] == pytest.approx(3 / 5)
    # Standard error of a mean of {1, 0, 1, 0, 1}: s / sqrt(5).
    assert results["results"]["gsm8k"]["pass@10_stderr,verdicts"] == pytest.approx((0.3) ** 0.5 / 5**0.5)


def arc_documents():
    documents = []
    for row in arc_rows():
        question, texts, labels, answer = read_choices(row)
        documents.append({"question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer})
    return documents


def test_multiple_choice_uses_row_labels_and_the_training_prompt():
    tokenizer = tiny_tokenizer()
    # An oracle that always prefers the correct label, for any labels.
    rights = {}
    for row in arc_rows():
        turns = multiple_choice(row)
        rights[tuple(render_prompt(turns[:1], tokenizer))] = tokenizer.encode(row["answerKey"])[0]
    lm = oracle(
        lambda item: [[-1.0 if c == (rights[item[0].context],) else -2.0, False] for c in item[0].continuations],
        tokenizer,
    )
    results = run(lm, ARC_EASY.definition(), arc_documents())
    assert results["results"]["arc_easy"]["acc,none"] == 1.0
    assert sorted(len(item[0].continuations) for item in lm.asked) == [3, 3, 4, 4, 4, 4, 5]
    assert all(len(c) == 1 for item in lm.asked for c in item[0].continuations)


def test_special_tokens_in_a_question_are_text():
    tokenizer = tiny_tokenizer()
    prompt = oracle(None, tokenizer).apply_chat_template([{"role": "user", "content": QUOTING}])
    ends = [n for n, id_ in enumerate(prompt.ids) if id_ == tokenizer.special("<|user_end|>")]
    assert ends == [len(prompt.ids) - 2]
    assert list(prompt.ids) == render_prompt(question_and_answer(QUOTING)[:1], tokenizer)
    assert prompt == f"<|bos|><|user_start|>{QUOTING}<|user_end|><|assistant_start|>"
    for same in (pickle.loads(pickle.dumps(prompt)), copy.deepcopy(prompt)):
        assert (same, same.ids, type(same)) == (prompt, prompt.ids, Prompt)


def likelihood(context, *continuations):
    return [Instance("loglikelihood", {}, (context, each), n, ("task", 0, 1)) for n, each in enumerate(continuations)]


def test_labels_that_are_not_single_tokens_are_an_error():
    small = train_tokenizer(["hello hello"], 267, max_chars=100, crop=100)  # bytes and two merges: " A" is two tokens
    with pytest.raises(DataError, match="A, B is a token of its own"):
        oracle(None, small).loglikelihood(likelihood("Question", " A", " B"))


def generation(context, samples=1, **settings):
    request = Instance("generate_until", {}, (context, settings), 0, ("task", 0, samples))
    return [request] * samples


def test_stop_strings_end_an_answer_and_are_not_included():
    tokenizer, model = tiny_tokenizer(), tiny_model(320)
    ids = [tokenizer.bos, *tokenizer.encode("water")]
    (free,) = Engine(model, tokenizer, uses_tools=False).complete([ids], Sampling(30))[0]
    text = tokenizer.decode(free)
    stop = text[9:11]
    lm = alone(model, tokenizer)
    assert lm.generate_until(generation("water", max_gen_toks=30, until=[stop])) == [text.split(stop)[0]]
    assert lm.generate_until(generation("water", max_gen_toks=30, until=[])) == [text]
