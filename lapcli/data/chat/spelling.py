"""Two generated tasks that teach a model of tokens which letters they stand for.

SimpleSpelling: spell a word. SpellingBee: count a letter in a word, by hand and then with the calculator. Row i is
drawn from `Random(i)`, a test row from `Random(10,000,000 + i)`; the calls of the generator and their order are
nanochat's, the wording is our own.
"""

import random
from collections.abc import Sequence

from lapcli.data.chat.conversation import Part, Turn, question_and_answer

TEST_SEED = 10_000_000
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
    """SimpleSpelling draws from the list in an order of its own."""
    shuffled = list(words)
    random.Random(42).shuffle(shuffled)
    return shuffled


def simple_spelling(words: Sequence[str], number: int, split: str = "train") -> list[Turn]:
    """`words` in the order of `shuffled_words`."""
    word = random.Random(_seed(number, split)).choice(words)
    return question_and_answer(f"Spell this word: {word}", f"{word}:{','.join(word)}")


def spelling_bee(words: Sequence[str], number: int, split: str = "train") -> list[Turn]:
    draw = random.Random(_seed(number, split))
    word = draw.choice(words)
    letter = draw.choice(word) if draw.random() < 0.9 else draw.choice(_LETTERS)
    template = draw.choice(QUESTIONS)
    if draw.random() < 0.3:
        template = template.lower()
    letter_quote, word_quote = draw.choice(_QUOTES), draw.choice(_QUOTES)
    question = template.format(letter=f"{letter_quote}{letter}{letter_quote}", word=f"{word_quote}{word}{word_quote}")
    if draw.random() < 0.5:
        question += "?"
    return question_and_answer(question, *_answer(word, letter))


def _answer(word: str, letter: str) -> list[Part]:
    """The character follows its number without a space, so that its token is the bare letter's."""
    lines = [f"Let me count '{letter}' in '{word}'. First by hand, letter by letter.\n\n{word}:{','.join(word)}\n"]
    count = 0
    for number, character in enumerate(word, start=1):
        hit = character == letter
        count += hit
        lines.append(f"{number}:{character}{f' found, that makes {count}' if hit else ''}")
    lines.append(f"\nBy hand that is {count}.\n\n")
    return [
        Part("text", "\n".join(lines)),
        Part("text", "Now the same with Python:\n\n"),
        Part("python", f"'{word}'.count('{letter}')"),
        Part("python_output", str(count)),
        Part("text", f"\n\nPython counts {count} as well.\n\n#### {count}"),
    ]


def _seed(number: int, split: str) -> int:
    return number + (TEST_SEED if split == "test" else 0)
