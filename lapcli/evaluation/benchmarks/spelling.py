"""Spelling: how often a letter occurs in a word; generated, so that it needs no data."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from lapcli.data.chat.generated import builtin_words, spelling_bee
from lapcli.data.text.builtin import builtin_text
from lapcli.evaluation.benchmarks.benchmark import BenchmarkRequest, BenchmarkSettings, Documents, PreparedTask
from lapcli.evaluation.benchmarks.gsm8k import NumberBenchmark, final_number
from lapcli.recipe.schema import CHAT, LANGUAGE
from lapcli.runtime.files import sha256_of_file

DOCUMENTS = 256


class Spelling(NumberBenchmark):
    name = "spelling"
    label = "spelling"
    help = "letters in words, counted (needs no data)"
    needs = frozenset({LANGUAGE, CHAT})

    def documents(self, split: str, data: Path | None) -> Documents:
        """Generate rows that training does not see, from the words of the built-in text."""
        words = builtin_words()
        documents = []
        for number in range(DOCUMENTS):
            question, answer = spelling_bee(words, number, split)
            last = answer.parts[-1].text
            documents.append({"question": question.parts[0].text, "answer": last, "number": final_number(last)})
        digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
        return Documents(documents, {f"generated from builtin text {sha256_of_file(builtin_text())[:16]}": digest})

    def lm_eval_task(self, request: BenchmarkRequest) -> PreparedTask:
        """Ask for the likeliest answer alone; lm-eval itself has no such task."""
        seed = request.settings.seed
        greedy = BenchmarkSettings("paper", samples=1, temperature=0.0, top_k=None, seed=seed)
        return self.paper_task(replace(request, settings=greedy))


SPELLING = Spelling()
