"""Questions and answers about the Python library, made from the built-in text: data that needs no network.

The text holds the full name of each module, class and function, then its docstring. The first paragraph of the
docstring answers what that thing is.
"""

import json
import re
from collections.abc import Iterator
from itertools import pairwise

from lapcli.data.chat.conversation import Turn, question_and_answer
from lapcli.data.text.builtin import builtin_text

_NAME = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+")
_LONGEST = 240  # characters of an answer
_QUESTIONS = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "Tell me about {name}.",
    "What is {name} for?",
)


def builtin_questions() -> Iterator[list[Turn]]:
    """In the order of the text, each name once."""
    seen: set[str] = set()
    with builtin_text().open(encoding="utf-8") as lines:
        for line in lines:
            paragraphs = json.loads(line)["text"].split("\n\n")
            for name, answer in pairwise(paragraphs):
                answer = " ".join(answer.split())
                is_pair = _NAME.fullmatch(name) and not _NAME.fullmatch(answer) and "._" not in name
                if not is_pair or name in seen or not 10 <= len(answer) <= _LONGEST:
                    continue
                question = _QUESTIONS[len(seen) % len(_QUESTIONS)].format(name=name)
                seen.add(name)
                yield question_and_answer(question, answer)
