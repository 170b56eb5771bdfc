"""Conversations that need no download: questions about the Python library, and two spelling tasks on a word list.

The built-in text has the full name of each module, class and function, then its docstring, whose first paragraph is
used as the answer. The spelling tasks teach the model which letters its tokens consist of. SimpleSpelling:
spell a word. SpellingBee: count a letter in a word, by hand and then with the calculator. Row i is drawn from
`Random(i)`, a test row from `Random(10,000,000 + i)`; the calls of the generator and their order are nanochat's, the
wording is our own.
"""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lapcli.data.chat.conversation import MessagePart, Turn, question_and_answer
from lapcli.data.files import digest, read_plain_text, read_rows
from lapcli.data.sources import source_files
from lapcli.data.text.builtin import builtin_text
from lapcli.data.token_store import file_key
from lapcli.recipe.chat import GENERATED, DataSet
from lapcli.runtime.errors import DataError

GENERATED_FORMATS = (*GENERATED, "questions")  # formats whose rows are generated, not read
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
    """Yield questions in the order of the text, each name once."""
    seen: set[str] = set()
    for text in _builtin_documents():
        for name, answer in pairwise(text.split("\n\n")):
            answer = " ".join(answer.split())
            is_pair = _NAME.fullmatch(name) and not _NAME.fullmatch(answer) and "._" not in name
            if is_pair and name not in seen and 10 <= len(answer) <= _LONGEST:
                question = _QUESTIONS[len(seen) % len(_QUESTIONS)].format(name=name)
                seen.add(name)
                yield question_and_answer(question, answer)


def _builtin_documents() -> Iterator[str]:
    return (row["text"] for row in read_rows(builtin_text()))


TEST_SEED = 10_000_000  # beyond the number of any training row
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_QUOTES = ("", "'", '"')

QUESTIONS = (
    "How many {letter} are in {word}",
    "How often does {letter} occur in {word}",
    "Count the letter {letter} in {word}",
    "Count every {letter} in the word {word}",
    "Tell me how many times {letter} is used in {word}",
    "What is the number of {letter} in {word}",
    "In {word}, how many {letter} do you see",
    "In the word {word}, how many letters are {letter}",
    "How many times do I type {letter} when I write {word}",
    "Please count {letter} in {word}",
    "Could you count the {letter} letters of {word}",
    "Can you say how many {letter} {word} has",
    "How many of the letters of {word} are {letter}",
    "Find the count of {letter} in {word}",
    "Give me the number of times {letter} shows up in {word}",
    "{word}: how many {letter}",
    "Number of {letter} in {word}",
    "I need to know how many {letter} are inside {word}",
    "Do you know how many {letter} are in {word}",
    "How many {letter} does one find in {word}",
    "What is the frequency of {letter} in {word}",
    "Is there a {letter} in {word}, and how many of them",
    "Look at {word}. How many {letter} are there",
    "Go through {word} and count {letter}",
    "If I spell {word}, how many {letter} do I say",
    "Work out how many {letter} make up {word}",
    "How many copies of {letter} does {word} hold",
    "Quick question: how many {letter} in {word}",
    "Letter count please: {letter} in {word}",
    "How many {letter} would you need to write {word}",
    "¿Cuántas veces sale {letter} en {word}",
    "¿Cuántas {letter} tiene {word}",
    "Cuenta las {letter} de {word}",
    "Dime cuántas {letter} hay en {word}",
    "{word}里有几个{letter}",
    "请数一数{word}中的{letter}",
    "{letter}在{word}中出现几次",
    "{word}这个词含有多少个{letter}",
    "{word}에 {letter}가 몇 개 있나요",
    "{word}에서 {letter}를 세어 주세요",
    "{letter}는 {word}에 몇 번 나오나요",
    "{word}라는 단어에 {letter}가 몇 번 들어 있나요",
    "Combien de {letter} y a-t-il dans {word}",
    "Combien de fois {letter} figure dans {word}",
    "Compte les {letter} du mot {word}",
    "Wie viele {letter} sind in {word}",
    "Wie oft kommt {letter} in {word} vor",
    "Zähle die {letter} im Wort {word}",
    "{word}に{letter}はいくつありますか",
    "{word}の中の{letter}を数えてください",
    "{letter}は{word}に何回出てきますか",
)


def shuffled_words(words: Sequence[str]) -> list[str]:
    """Return the words in the order of SimpleSpelling, shuffled with nanochat's seed."""
    shuffled = list(words)
    random.Random(42).shuffle(shuffled)
    return shuffled


def simple_spelling(words: Sequence[str], number: int, split: str = "train") -> list[Turn]:
    """Return a row of SimpleSpelling; `words` are in the order of `shuffled_words`."""
    word = random.Random(_seed(number, split)).choice(words)
    return question_and_answer(f"Spell this word: {word}", f"{word}:{','.join(word)}")


def spelling_bee(words: Sequence[str], number: int, split: str = "train") -> list[Turn]:
    draw = random.Random(_seed(number, split))  # the order of the draws below is nanochat's
    word = draw.choice(words)
    # Python draws the condition before the letter, as nanochat does. A tenth of the letters may not occur in the word.
    letter = draw.choice(word) if draw.random() < 0.9 else draw.choice(_LETTERS)
    template = draw.choice(QUESTIONS)
    if draw.random() < 0.3:
        template = template.lower()  # before it is filled: word and letter stay as they are
    letter_quote, word_quote = draw.choice(_QUOTES), draw.choice(_QUOTES)
    question = template.format(letter=f"{letter_quote}{letter}{letter_quote}", word=f"{word_quote}{word}{word_quote}")
    if draw.random() < 0.5:
        question += "?"
    return question_and_answer(question, *_answer(word, letter))


def _answer(word: str, letter: str) -> list[MessagePart]:
    """Return the answer; no space before a character, so that it has the token of the bare letter."""
    lines = [f"Let me count '{letter}' in '{word}'. First by hand, letter by letter.\n\n{word}:{','.join(word)}\n"]
    count = 0
    for number, character in enumerate(word, start=1):
        hit = character == letter
        count += hit
        lines.append(f"{number}:{character}{f' found, that makes {count}' if hit else ''}")
    lines.append(f"\nBy hand that is {count}.\n\n")
    return [
        MessagePart("text", "\n".join(lines)),
        MessagePart("text", "Now the same with Python:\n\n"),
        MessagePart("python", f"'{word}'.count('{letter}')"),
        MessagePart("python_output", str(count)),
        MessagePart("text", f"\n\nPython counts {count} as well.\n\n#### {count}"),
    ]


def _seed(number: int, split: str) -> int:
    return number + (TEST_SEED if split == "test" else 0)


_WORD = re.compile(r"[a-z]{3,}")


def builtin_words() -> list[str]:
    """Return the words of the built-in text in alphabetical order."""
    return sorted({word for text in _builtin_documents() for word in _WORD.findall(text)})


def generated_conversations(data_set: DataSet) -> Iterator[list[Turn]]:
    """Yield the rows of a data set whose format is one of `GENERATED_FORMATS`."""
    if data_set.format == "questions":
        yield from builtin_questions()
        return
    words, make = words_of(data_set), spelling_bee
    if data_set.format == "simple_spelling":
        words, make = shuffled_words(words), simple_spelling  # only this task shuffles its words, as in nanochat
    for number in range(data_set.rows or 0):
        yield make(words, number, data_set.split)


def generated_key(data_set: DataSet) -> list[Any]:
    """Return everything on which the generated rows depend, for the cache key."""
    key: list[Any] = file_key(_words_file(data_set))
    return key if data_set.format == "questions" else [key, data_set.rows, data_set.split, digest(QUESTIONS)]


def words_of(data_set: DataSet) -> list[str]:
    if data_set.source == "builtin":
        return builtin_words()
    words = read_plain_text(path := _words_file(data_set)).split()
    if not words:
        raise DataError(f"{path} has no words; name another file as source")
    return words


def _words_file(data_set: DataSet) -> Path:
    if data_set.source == "builtin":
        return builtin_text()
    return (source_files(*data_set.place, "chat") or [])[0]
