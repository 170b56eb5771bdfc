"""Packages that declare `lap.plugins` are found, imported only when needed, skipped when broken, refused on a clash."""

import os
import subprocess
import sys
from pathlib import Path

from support import run_process

ASK = """
from dataclasses import dataclass
from lapcli.runtime.errors import UsageError
from lapcli.runtime.plugins import Registry

@dataclass
class Named:
    name: str

OWN = Named("own")
registry = Registry("analysis", {"own": "__main__:OWN"})
"""


def install(folder: Path, package: str, module: str, version: str = "1.2") -> None:
    """A package as installed by pip: a module, and metadata with one entry point."""
    name = package.replace("-", "_")
    (folder / f"{name}.py").write_text(module)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[lap.plugins]\n{name} = {name}\n")


def ask(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *sys.path])
    return run_process(
        [sys.executable, "-c", ASK + code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


APPLE = """
class Apple:
    name = "apple"

def register(extensions):
    extensions.add("analysis", Apple())
"""


def test_a_package_adds_an_entry(tmp_path):
    install(tmp_path, "fruit-stand", APPLE)
    result = ask(tmp_path, 'print(list(registry), registry["apple"].name)')
    assert result.stdout == "['own', 'apple'] apple\n", result.stderr


def test_a_known_name_imports_no_plugin(tmp_path):
    install(tmp_path, "loud", "print('imported')\ndef register(extensions): pass\n")
    assert ask(tmp_path, 'registry["own"]; "own" in registry; registry.built_in()').stdout == ""
    assert ask(tmp_path, '"other" in registry').stdout == "imported\n"


def test_a_broken_plugin_is_named_and_skipped(tmp_path):
    install(tmp_path, "broken", "import nowhere_to_be_found\n")
    install(tmp_path, "whole", APPLE)
    result = ask(tmp_path, "print(list(registry))")
    assert result.stdout == "['own', 'apple']\n"
    assert "broken" in result.stderr
    assert "nowhere_to_be_found" in result.stderr


def test_a_name_clash_is_an_error_that_names_both_packages(tmp_path):
    install(tmp_path, "greedy", APPLE.replace('"apple"', '"own"'))
    result = ask(tmp_path, "try:\n    list(registry)\nexcept UsageError as error:\n    print(error)")
    assert "greedy" in result.stdout
    assert "'own'" in result.stdout
    assert "which lap has already" in result.stdout
