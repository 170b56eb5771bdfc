"""The recipes that ship with lap: their list, and commented copies of them as starter recipes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lapcli.recipe.loading import load_recipe, shipped_recipes
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import write_text

FOLDERS = {"sweeps": "sweep", "ladders": "ladder"}  # of files that are not recipes, and what they are
_LONGEST = 140  # characters of a line about a recipe


@dataclass(frozen=True)
class Shipped:
    name: str  # as commands take it: quickstart, sweeps/laptop
    path: Path
    kind: str  # its objective, sweep or ladder
    summary: str


@dataclass(frozen=True)
class Starter:
    """A copy of a shipped recipe to be adapted to the user's data; `header` replaces its leading comment."""

    recipe: str
    command: str
    header: str
    needs: str | None = None  # the job whose run it starts from


STARTERS = {
    "text": Starter(
        "quickstart",
        "lap train {file}",
        "A GPT on your own text. Unchanged, it learns Python's documentation, in minutes on two CPU cores.\n"
        "Your data: data.train takes a file or folder of .txt, .jsonl or .parquet, or hub:OWNER/NAME. A larger corpus\n"
        "needs a larger tokenizer.vocab, model and train.steps; `lap plan {file}` says what a recipe takes.",
    ),
    "images": Starter(
        "vit_digits",
        "lap train {file}",
        "A ViT that classifies your own images. Unchanged, it learns handwritten digits, in minutes on two cores.\n"
        "Your data: data.train takes a folder with a folder of images for each class, or hub:OWNER/NAME. Then set\n"
        "model.classes, model.image and model.patch to fit, and remove mean, std and augmentation for photographs.",
    ),
    "chat": Starter(
        "chat_quickstart",
        "lap sft {file}",
        "Teaches the newest finished GPT to answer: two stages, each a separate run. Unchanged, it teaches spelling.\n"
        "Your data: an entry {name: mine, format: conversations, source: chats.jsonl} in each mixture, where a line\n"
        'of the file is a list of turns such as {"role": "user", "content": "..."}; one line in twenty is held out to\n'
        "validate on. Afterwards `lap chat` talks to it.",
        needs="text",
    ),
    "self-supervised": Starter(
        "dino_quickstart",
        "lap train {file}",
        "A ViT that learns from your own images without labels. Unchanged, it uses two photographs, in minutes on\n"
        "two cores. Your data: data.train takes a folder with folders of images, which only its k-NN score takes for\n"
        "classes, or hub:OWNER/NAME. Then raise data.crops.global_size, model.patch and train.steps.",
    ),
}


def list_shipped() -> list[Shipped]:
    """Return the recipes by name, then the sweeps and the ladders."""
    folders = [shipped_recipes(), *(shipped_recipes() / name for name in FOLDERS)]
    return [_shipped(path) for folder in folders for path in sorted(folder.glob("*.yaml"))]


def _shipped(path: Path) -> Shipped:
    summary = _first_sentence(path.read_text(encoding="utf-8"))
    if (kind := FOLDERS.get(path.parent.name)) is not None:
        return Shipped(f"{path.parent.name}/{path.stem}", path, kind, summary)
    return Shipped(path.stem, path, load_recipe(path).objective, summary)


def _first_sentence(text: str) -> str:
    """Return the first sentence of a recipe's leading comment; if it is long, only the part before its colon."""
    comment = " ".join(line.lstrip("# ") for line in _leading_comment(text))
    sentence = re.split(r"\.\s", comment, maxsplit=1)[0].removesuffix(".")
    return sentence if len(sentence) <= _LONGEST else sentence.split(": ")[0]


def _leading_comment(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        yield line


def write_starter(job: str, folder: Path, values: Mapping[str, str | None] | None = None) -> list[tuple[Path, str]]:
    """Write the recipe of a job, named as the folder, and of the job that it starts from; return each file with the
    command to run next. `values` replaces values of keys, and leaves out those that are None."""
    starter = STARTERS[job]
    jobs = [job] if starter.needs is None else [starter.needs, job]
    own_name = folder.resolve().name
    files = {name: folder / f"{own_name if name == job else name.replace('-', '_')}.yaml" for name in jobs}
    if len(set(files.values())) < len(jobs):
        raise UsageError(f"{folder}: its chat recipe would overwrite the recipe of its base model; choose another name")
    for file in files.values():
        if file.exists():
            raise UsageError(f"{file} already exists; choose another folder, or move the file away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, file in files.items():
            write_text(file, _starter_text(STARTERS[name], file, values or {}))
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); name another folder") from None
    return [(file, STARTERS[name].command.format(file=file)) for name, file in files.items()]


def _with_values(line: str, values: Mapping[str, str | None]) -> str | None:
    """Return a line of a recipe with another value of its key; None if the key is to be left out."""
    found = re.match(r"(  )(\w+): \S", line)
    if found is None or found[2] not in values:
        return line
    value = values[found[2]]
    return None if value is None else f"  {found[2]}: {value}"


def _starter_text(starter: Starter, file: Path, values: Mapping[str, str | None]) -> str:
    text = (shipped_recipes() / f"{starter.recipe}.yaml").read_text(encoding="utf-8")
    body = text.splitlines()[len(list(_leading_comment(text))) :]
    header = [*starter.header.replace("{file}", str(file)).splitlines(), starter.command.replace("{file}", str(file))]
    kept = [new for line in body if (new := _with_values(line, values)) is not None]
    return "\n".join([*(f"# {line}" for line in header), *kept, ""])
