"""The key that was probably meant: in its section first, then anywhere in the recipe."""

from difflib import get_close_matches

from lapcli.recipe.problems import listed
from lapcli.recipe.section import Section, item_section, subsection

Path = tuple[str, ...]


def key_paths(section: type[Section], under: Path = ()) -> list[Path]:
    """Every key that a recipe may say, sections included."""
    paths: list[Path] = []
    for name, field in section.model_fields.items():
        paths.append((*under, name))
        if inner := subsection(field) or item_section(field):
            paths += key_paths(inner, (*under, name))
    return paths


def misspelt(key: str, section: type[Section]) -> str | None:
    """The key of this section that `key` surely is, for a slip of a letter or two."""
    return next(iter(get_close_matches(key, list(section.model_fields), 1, cutoff=0.8)), None)


def unknown_key(key: str, section: type[Section], recipe: type[Section]) -> str:
    """What to say of a key that its section does not have."""
    if key == "<<":
        return "unknown key; merge keys are not supported, use `extends` or repeat the keys"
    paths = key_paths(recipe)
    if (path := tuple(key.split("."))) in paths and len(path) > 1:
        return f"unknown key; write `{path[-1]}:` in the section `{'.'.join(path[:-1])}:`"
    here = get_close_matches(key, list(section.model_fields), 1)
    elsewhere = [path for path in paths if path[-1] == key]
    if not elsewhere and not here:
        close = get_close_matches(key, [path[-1] for path in paths], 1, cutoff=0.7)
        elsewhere = [path for path in paths if path[-1] in close]
    if elsewhere:
        return f"unknown key here; did you mean {listed(['`' + '.'.join(path) + '`' for path in elsewhere])}?"
    if here:
        return f"unknown key; did you mean `{here[0]}`?"
    return f"unknown key; known here: {', '.join(section.model_fields)}"
