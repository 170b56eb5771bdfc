"""No option is accepted and ignored: on each return path of a command, every declared option has been read.

A command that returns early (`if validate: ...; return`) would ignore every other flag that it has not read by
then. Paths that end in an error are refusals. With `--dry-run` a command accepts all options
of the real command, even if it prints only part of them.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest
import typer
from support import run_main

from lapcli import cli


def commands() -> Iterator[tuple[str, object]]:
    for section in cli.SECTIONS.values():
        for name, command in section.items():
            if isinstance(command, typer.Typer):
                yield from (
                    (f"{name} {each.name or each.callback.__name__}", each.callback)
                    for each in command.registered_commands
                )
            else:
                yield name, command


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def ways_out(statements: list[ast.stmt], read: set[str]) -> Iterator[tuple[int, set[str]]]:
    """Each return that is not the end of the function: its line, and the names read before it."""
    for statement in statements:
        if isinstance(statement, ast.Return):
            yield statement.lineno, read | names(statement)
            return
        if isinstance(statement, ast.If):
            read = read | names(statement.test)
            if "dry_run" not in names(statement.test):
                yield from ways_out(statement.body, read)
                yield from ways_out(statement.orelse, read)
        read = read | names(statement)


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_read_on_every_return_path(name):
    function = ast.parse(textwrap.dedent(inspect.getsource(COMMANDS[name]))).body[0]
    declared = {each.arg for each in function.args.args} - {"context"}
    ways = list(ways_out(function.body, set()))
    ways.append((0, set().union(*map(names, function.body))))  # the end of the function
    for line, read in ways:
        assert declared <= read, f"line {line} of the command ignores {declared - read}"


def test_the_check_finds_an_ignored_flag():
    source = "def f(a, b):\n    if a:\n        print(a)\n        return\n    print(b)\n"
    ((line, read),) = ways_out(ast.parse(source).body[0].body, set())
    assert (line, "b" in read) == (4, False)


@pytest.mark.parametrize(
    "line",
    ["ladder --validate --target c2", "ladder ladders/gpt_cpu --validate", "recipes train.micro_batch --print"],
)
def test_flags_that_exclude_each_other_are_refused(line, capsys):
    code, out, err = run_main(capsys, *line.split())
    assert (code, out) == (2, "")
    assert next(word for word in ("--validate", "--print") if word in line) in err
