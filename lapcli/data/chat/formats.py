"""Data sets of conversations: their files (on the hub, behind https, or local), and row parsing.

Formats: chats in the common forms, multiple choice (MMLU, ARC), and GSM8K with its calculator.

    OpenAI     {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}, or the list
    ShareGPT   {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    Alpaca     {"instruction": "...", "input": "...", "output": "..."}
"""

import re
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from lapcli.data.cache import build_once, digest
from lapcli.data.chat.conversation import Malformed, MessagePart, Turn, conversation, question_and_answer
from lapcli.data.file_formats import ROW_SUFFIXES
from lapcli.data.source_files import source_files as files_of
from lapcli.recipe import load_recipe
from lapcli.recipe.chat import ChatRecipe, DataSet, Stage
from lapcli.runtime.environment import cache_dir, hub_is_offline
from lapcli.runtime.errors import DataError, UsageError
from lapcli.runtime.progress import Progress

_MARK = re.compile(r"<<(.*?)>>", re.DOTALL)


#: For the error message about rows in none of these forms.
EXPECTED_FORMS = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} (OpenAI), '
    '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]} (ShareGPT) or '
    '{"instruction": "...", "output": "..."} (Alpaca)'
)
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def chat(row: Any) -> list[Turn]:
    """Parse a row in any of the three forms; raise Malformed if it is in none."""
    if not isinstance(row, Mapping):
        return conversation([_message(message) for message in row] if _is_list(row) else row)
    key = next((key for key in ("messages", "conversations", "instruction") if key in row), None)
    if key is None:
        raise Malformed(
            f"there is no 'messages', 'conversations' or 'instruction', but {', '.join(map(str, row))[:60]}"
        )
    messages = _alpaca_messages(row) if key == "instruction" else row[key]
    if not _is_list(messages):
        raise Malformed(f"there is no list under '{key}'")
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return conversation([*system, *map(_message, messages)])


def _message(message: Any) -> Any:
    """Convert a message of either form to OpenAI's form."""
    if isinstance(message, Mapping) and "from" in message and "value" in message:
        return {"role": _ROLES.get(str(message["from"]), message["from"]), "content": message["value"]}
    return message


def _alpaca_messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Convert a row; the input follows the instruction."""
    question = _text(row, "instruction") + (f"\n\n{_text(row, 'input')}" if row.get("input") else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _text(row, "output")}]


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def multiple_choice_question(question: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    """Format a question; no space before the label, so that it is the same token as in the answer."""
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    return "\n".join([f"Multiple choice: {question}", *lines, "", "Answer with the letter of the right choice alone."])


def multiple_choice(row: Any) -> list[Turn]:
    """Parse a row of MMLU or ARC in any of their common formats."""
    question, choices, labels, answer = read_choices(row)
    return question_and_answer(multiple_choice_question(question, choices, labels), answer)


def read_choices(row: Any) -> tuple[str, list[str], list[str], str]:
    """Return question, choices, their labels and the answer's label; raise Malformed if inconsistent."""
    question, choices, labels, answer = _read_choices(row)
    if len(choices) != len(labels) or not choices:
        raise Malformed(f"there are {len(choices)} choices and {len(labels)} labels")
    # ARC's labels are its own: letters or digits, three to five of them.
    if answer not in labels:
        raise Malformed(f"the answer {str(answer)[:20]!r} is not one of the labels {', '.join(labels)[:60]}")
    return question, choices, labels, answer


def gsm8k(row: Any) -> list[Turn]:
    """Parse a row of GSM8K; `<<48/2=24>>` in the answer becomes a call of the calculator and its output."""
    parts: list[MessagePart] = []
    # Texts and calculations in turn, since the pattern has one group.
    for number, text in enumerate(_MARK.split(_text(row, "answer"))):
        if number % 2 == 0:
            parts += [MessagePart("text", text)] if text else []
            continue
        expression, sign, result = text.rpartition("=")
        if not sign:
            raise Malformed(f"the calculation {text[:40]!r} has no result")
        parts += [MessagePart("python", expression), MessagePart("python_output", result)]
    return question_and_answer(_text(row, "question"), *parts)


#: By the `format` of a data set.
READERS: dict[str, Callable[[Any], list[Turn]]] = {
    "conversations": chat,
    "multiple_choice": multiple_choice,
    "gsm8k": gsm8k,
}


def _read_choices(row: Any) -> tuple[str, list[str], list[str], str]:
    if _is_list(row):  # a line of MMLU's csv: question, choices, letter
        question, *choices, answer = _texts(row if len(row) > 3 else None)
        return question, choices, _letters(choices), answer
    if isinstance(row, Mapping) and isinstance(row.get("train"), Mapping):  # the hub's MMLU auxiliary_train
        row = row["train"]
    row = row if isinstance(row, Mapping) else {}
    question, options = row.get("question"), row.get("choices")
    if isinstance(question, Mapping):  # AI2's own file of ARC
        pairs = question.get("choices") or []
        if not _is_list(pairs):
            raise Malformed("there is no list of choices")
        texts, labels = ([_text(choice, key) for choice in pairs] for key in ("text", "label"))
        return _text(question, "stem"), texts, labels, _text(row, "answerKey")
    if isinstance(options, Mapping):  # the hub's ARC
        texts, labels = (_texts(options.get(key)) for key in ("text", "label"))
        return _text(row, "question"), texts, labels, _text(row, "answerKey")
    texts, answer = _texts(options), row.get("answer")  # the hub's MMLU
    if not isinstance(answer, int) or not 0 <= answer < len(texts):
        raise Malformed(f"the answer {str(answer)[:20]!r} is not the number of a choice")
    return _text(row, "question"), texts, _letters(texts), _letters(texts)[answer]


def _letters(choices: Sequence[str]) -> list[str]:
    return [chr(ord("A") + number) for number in range(len(choices))]


def _texts(values: Any) -> list[str]:
    if not _is_list(values) or not all(isinstance(value, str) for value in values):
        raise Malformed("there is no list of choices")
    return list(values)


def _text(row: Any, key: str) -> str:
    value = row.get(key) if isinstance(row, Mapping) else None
    if not isinstance(value, str):
        raise Malformed(f"there is no text under {key!r}")
    return value


_SECONDS = 60  # timeout of a download


def source_files(data_set: DataSet, progress: Progress | None = None, *, download: bool = True) -> list[Path] | None:
    """Return the files in the order of the recipe, downloaded if needed; None if `download` does not allow it."""
    if data_set.source.startswith("https://"):
        return _downloaded(data_set, download)
    place = data_set.source, data_set.files, data_set.revision
    try:
        return files_of(*place, "chat", ROW_SUFFIXES, progress, download=download)
    except DataError as error:
        raise DataError(f"{data_set.name}: {error}; or use --data DIR") from None


def load_chat_recipe(
    path: Path, overrides: Sequence[str] = (), data: Path | None = None, seed: int | None = None
) -> ChatRecipe:
    """Load a recipe with stages; `data` is a folder with copies of its data sets."""
    loaded = load_recipe(path, overrides, seed)
    if not isinstance(loaded, ChatRecipe):
        raise UsageError(f"{path} has no stages; it is trained by `lap train {path}`")
    return loaded if data is None else with_local_data(loaded, data)


def with_local_data(recipe: ChatRecipe, folder: Path) -> ChatRecipe:
    """Return the recipe with the copies of its data sets in `folder` as sources.

    A copy of hub:OWNER/NAME is NAME/ or OWNER/NAME/ with the hub's files; that of a file behind https has its name.
    Data sets without a copy keep their source.
    """

    def local(data_set: DataSet) -> DataSet:
        scheme, _, address = data_set.source.partition(":")
        path = urllib.parse.urlsplit(data_set.source).path if scheme == "https" else address
        for place in (path, path.rpartition("/")[2]) if scheme in ("hub", "https") else ():
            if place and (copy := folder / place.lstrip("/")).exists():
                at_this_place = {"source": str(copy), "revision": None}
                return data_set.model_copy(update={**at_this_place, "held_out": data_set.held_out or 0.0})
        return data_set

    def stage(before: Stage) -> Stage:
        validation = before.validation.model_copy(update={"mixture": [local(d) for d in before.validation.mixture]})
        return before.model_copy(update={"mixture": [local(d) for d in before.mixture], "validation": validation})

    if not folder.is_dir():
        raise DataError(f"--data {folder} is not a folder; give one that holds copies of the data sets, by their names")
    stages: dict[str, Stage] = {str(name): stage(before) for name, before in recipe.stages.given().items()}
    return recipe.model_copy(update={"stages": recipe.stages.model_copy(update=stages)})


def _downloaded(data_set: DataSet, download: bool) -> list[Path] | None:
    """Return the cached file, which never expires because the URL may serve another file when a run resumes."""
    name = Path(urllib.parse.urlsplit(data_set.source).path).name or "file"
    folder = cache_dir() / "downloads" / digest(data_set.source)[:16]
    if not download and not (folder / name).is_file():
        return None
    build_once(folder, lambda new: _download(data_set, new / name))
    return [folder / name]


def _download(data_set: DataSet, path: Path) -> None:
    try:
        if hub_is_offline():
            raise ValueError("HF_HUB_OFFLINE is set")
        with urllib.request.urlopen(data_set.source, timeout=_SECONDS) as answer:
            path.write_bytes(answer.read())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{data_set.name}: {data_set.source} could not be downloaded ({error}); correct the recipe, run `lap fetch "
            "RECIPE` where it can be reached, or put the file in a folder and use --data"
        ) from None
