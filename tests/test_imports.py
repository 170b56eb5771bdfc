"""Lazy imports keep heavy libraries out of start-up and have no other purpose: they never hide a cycle."""

import ast
import sys
from collections.abc import Iterator

from conftest import ROOT

# (module, what it imports inside a function): the reason.
REASONS = {
    ("lapcli.generation.dialogue", "readline"): "importing it changes how the terminal is read",
    ("lapcli.runtime.progress", "rich"): "bars, which only a terminal shows",
}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "lapcli").rglob("*.py")
    # Except code that runs without lap: in exported folders, and in the sandbox, whose processes load little.
    if path.name != "modeling_lap.py" and path.parent.name != "inside"
}


def imported(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Our modules by full name, others by package name."""
    if isinstance(statement, ast.Import):
        names = [alias.name for alias in statement.names]
    else:
        assert not statement.level, "imports are absolute"
        base = statement.module or ""
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in statement.names]
    return [name if name in MODULES else name.partition(".")[0] for name in names]


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """The imports of a module, and whether each is inside a function, without those for type checkers only."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from ((name, inside) for name in imported(child))
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.Lambda))

    return walk(ast.parse(MODULES[module].read_text()), inside=False)


AT_THE_TOP = {module: {name for name, inside in imports(module) if not inside} for module in MODULES}


def loaded(start: str) -> set[str]:
    """Libraries that importing a module loads, directly or indirectly."""
    seen, waiting = set(), [start]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        waiting += [*AT_THE_TOP.get(name, ()), *(parent for parent in parents if parent in MODULES)]
    return {name for name in seen if name not in MODULES and name not in sys.stdlib_module_names}


def test_lazy_imports_are_for_heavy_libraries():
    needless = [
        f"{module} imports {name} inside a function, and has loaded all of its libraries already"
        for module in sorted(MODULES)
        for name, inside in imports(module)
        if inside and (module, name) not in REASONS and loaded(name) <= loaded(module)
    ]
    assert needless == []


def test_every_reason_is_still_needed():
    lazy = {(module, name) for module in MODULES for name, inside in imports(module) if inside}
    assert set(REASONS) <= lazy


def test_names_and_help_need_no_heavy_library():
    heavy = {"torch", "timm", "datasets", "lm_eval", "transformers", "matplotlib", "pyarrow", "scipy", "sklearn"}
    light = [
        "lapcli.cli",
        "lapcli.recipe",
        "lapcli.objectives",
        "lapcli.runs",
        "lapcli.heads.plan",
        "lapcli.report.page",
    ]
    light += [module for module in MODULES if module.startswith("lapcli.commands.")]
    assert {module: loaded(module) & heavy for module in light if loaded(module) & heavy} == {}
