"""Packages that declare `lap.plugins` are found, imported only when needed, skipped when broken, refused on a clash."""

import os
import subprocess
import sys
from pathlib import Path

from support import ROOT, run_process

ASK = """
from dataclasses import dataclass
from lapcli.runtime.errors import UsageError
from lapcli.runtime.plugins import Registry, origin_of

@dataclass
class Named:
    name: str

OWN = Named("own")
registry = Registry("analysis", {"own": "__main__:OWN"})
"""


def install(folder: Path, package: str, module: str, version: str = "1.2") -> None:
    """A package as pip would leave it: a module, and metadata with one entry point."""
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


def lap_with(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`lap WORDS` with the packages of that folder installed."""
    path = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    command = [sys.executable, "-m", "lapcli", *words]
    return run_process(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


APPLE = """
class Apple:
    name = "apple"

def register(extensions):
    extensions.add("analysis", Apple())
"""


def test_a_package_adds_an_entry_with_its_name_and_version(tmp_path):
    install(tmp_path, "fruit-stand", APPLE)
    result = ask(tmp_path, 'print(list(registry), registry["apple"].name, origin_of("analysis", "apple"))')
    assert result.stdout == "['own', 'apple'] apple Origin(package='fruit-stand', version='1.2')\n", result.stderr


def test_a_known_name_imports_no_plugin(tmp_path):
    install(tmp_path, "loud", "print('imported')\ndef register(extensions): pass\n")
    assert ask(tmp_path, 'registry["own"]; "own" in registry; registry.built_in()').stdout == ""
    assert ask(tmp_path, '"other" in registry').stdout == "imported\n"


def test_an_entry_waits_for_a_registry_that_is_made_later(tmp_path):
    install(tmp_path, "stone", APPLE.replace("analysis", "benchmark").replace("apple", "opal"))
    result = ask(tmp_path, 'list(registry); later = Registry("benchmark", {}); print(list(later))')
    assert result.stdout == "['opal']\n", result.stderr


def test_a_broken_plugin_is_named_and_skipped(tmp_path):
    install(tmp_path, "broken", "import nowhere_to_be_found\n")
    install(tmp_path, "whole", APPLE)
    result = ask(tmp_path, "print(list(registry))")
    assert result.stdout == "['own', 'apple']\n"
    assert "broken" in result.stderr
    assert "nowhere_to_be_found" in result.stderr


def test_an_entry_of_a_sort_that_there_is_not_is_refused_with_those_that_there_are(tmp_path):
    install(tmp_path, "mistyped", APPLE.replace("analysis", "analyses"))
    result = ask(tmp_path, "print(list(registry))")
    assert result.stdout == "['own']\n"
    assert "plugin mistyped (mistyped) is skipped: ValueError: there is no sort 'analyses'" in result.stderr
    assert "objective, operator, analysis, benchmark, optimizer, data source" in result.stderr


def test_a_name_that_is_taken_is_an_error_that_names_both_owners(tmp_path):
    install(tmp_path, "greedy", APPLE.replace('"apple"', '"own"'))
    result = ask(tmp_path, "try:\n    list(registry)\nexcept UsageError as error:\n    print(error)")
    assert "greedy" in result.stdout
    assert "'own'" in result.stdout
    assert "which lap has already" in result.stdout


def test_an_unknown_name_suggests_the_nearest(tmp_path):
    result = ask(tmp_path, 'try:\n    registry["owm"]\nexcept UsageError as error:\n    print(error)')
    assert result.stdout == "there is no analysis 'owm'; did you mean own?\n"
