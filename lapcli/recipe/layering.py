"""Recipes on top of recipes: a file over the one it `extends`, and `--set` over both."""

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from lapcli.recipe.problems import Problem, Unreadable, key_shown, quoted
from lapcli.recipe.reading import MAX_DEPTH, Node, plain, read_file, read_text


def read_with_parents(path: Path) -> tuple[Node, list[Problem]]:
    """The recipe with all that it inherits; every value keeps the file and line where it really stands."""
    files: list[dict[str, Node]] = []
    problems: list[Problem] = []
    chain: list[str] = []
    said: str | None = None  # where the `extends` that leads here stands
    current: Path | None = path
    while current is not None:
        _must_be_a_file(current, said)
        chain.append(os.path.realpath(current))
        if chain[-1] in chain[:-1]:
            names = " -> ".join(Path(name).name for name in chain[chain.index(chain[-1]) :])
            raise Unreadable(Problem(said or str(path), "extends", f"the files extend each other: {names}"))
        entries, found = read_file(current)
        problems += found
        extends = entries.pop("extends", None)
        files.append(entries)
        said = extends.where if extends else None
        current = _parent(current, extends) if extends else None
    merged = Node({}, f"{path}:1")
    for entries in reversed(files):
        merged = merge(merged, Node(entries, f"{path}:1"))
    return merged, problems


def merge(below: Node, above: Node) -> Node:
    """Mappings are joined key by key; anything else is replaced."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    entries = dict(below.value)
    for key, node in above.value.items():
        entries[key] = merge(entries[key], node) if key in entries else node
    return Node(entries, above.where)


def apply_overrides(root: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """Each `key.path=value` acts as a file of one line that extends all before it."""
    problems: list[Problem] = []
    for text in overrides:
        try:
            above, found = _override(root, text)
        except Unreadable as error:
            key = key_shown(text.partition("=")[0])
            problems.append(Problem("--set", key, error.problem.message))
            continue
        problems += found
        root = merge(root, above)
    return root, problems


def _override(root: Node, text: str) -> tuple[Node, list[Problem]]:
    key, sign, value_text = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not sign or not all(path) or len(path) > MAX_DEPTH:
        raise _refused(f"expected key.path=value, such as train.steps=100, got {quoted(text)}")
    if path[0] == "extends":
        raise _refused("stands in a file and cannot be set; make a recipe that extends it")
    below: Node | None = root
    places = []
    for depth, part in enumerate(path):
        if below is not None and not isinstance(below.value, dict):
            above = key_shown(".".join(path[:depth]))
            raise _refused(f"`{above}` is {quoted(plain(below))}, which has no keys; set `{above}` itself")
        # A section that the file has keeps its line: it is where a key that is missing has to go.
        places.append(below.where if below is not None else "--set")
        below = below.value.get(part) if below is not None and isinstance(below.value, dict) else None
    node, problems = read_text(value_text, lambda line: "--set", under=tuple(path))
    if node is None:
        raise _refused("has no value after `=`; write null to mean none")
    for part, place in zip(reversed(path), reversed(places), strict=True):
        node = Node({part: node}, place)
    return node, problems


def _refused(message: str) -> Unreadable:
    return Unreadable(Problem("--set", "", message))


def _parent(child: Path, extends: Node) -> Path:
    name = extends.value
    if not isinstance(name, str) or not name.endswith((".yaml", ".yml")):
        message = f"expected the name of one .yaml file, got {quoted(plain(extends))}"
        raise Unreadable(Problem(extends.where, "extends", message))
    return child.parent / name


def _must_be_a_file(path: Path, said: str | None) -> None:
    """Refuses what is not there, with the nearest name that is; and folders, devices and pipes."""
    where, key = (said, "extends") if said else (str(path), "")
    about = f"{quoted(str(path))} " if said else ""
    try:
        if path.is_file():
            return
        if path.exists():
            raise Unreadable(Problem(where, key, f"{about}is not a file; name a .yaml file"))
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except (OSError, ValueError):
        raise Unreadable(Problem(where, key, f"{about}cannot be found; check the name")) from None
    near = get_close_matches(path.name, names, 1, cutoff=0.5)
    hint = f"did you mean {path.parent / near[0]}?" if near else "check the name"
    raise Unreadable(Problem(where, key, f"{about}does not exist; {hint}"))
