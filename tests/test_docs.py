"""The generated pages are up to date, every table and figure of the paper has its row, and the site is built."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from support import ROOT, run_main

from lapcli.cli import app
from lapcli.commands.sweep import _parsed

PAPER = yaml.safe_load((ROOT / "lapcli/report/paper.yaml").read_text())
COMMANDS = [*PAPER["trainings"].values(), *(command for row in PAPER["rows"] for command in row["measure"])]


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["reference/recipe.md", "reference/commands.md"])
def test_reference_pages_match_their_sources(generate, name):
    assert (ROOT / "docs" / name).read_text() == generate.PAGES[name](), "run `make docs`"


@pytest.mark.long
def test_the_paper_page_matches_its_sources(generate):
    assert (ROOT / "docs/paper.md").read_text() == generate.paper_page(), "run `make docs`"


def floats_of(tex: str) -> list[tuple[str, set[str]]]:
    """Return each table and figure of a paper: the heading above it, and its labels."""
    tex = re.sub(r"(?<!\\)%.*", "", tex)
    found, heading = [], ""
    pattern = (
        r"\\(?:paragraph|subsection|section)\{([^}]*)\}|\\begin\{(table|figure|wrapfigure)\*?\}(.*?)\\end\{\2\*?\}"
    )
    for title, kind, body in re.findall(pattern, tex, re.DOTALL):
        heading = heading if kind else title
        if kind:
            found.append((heading, set(re.findall(r"\\label\{([^}]*)\}", body))))
    return found


def test_every_table_and_figure_of_the_paper_has_its_row(test_data):
    paper = test_data.parent / "paper.tex"
    if not paper.is_file():
        pytest.skip("the paper's source is not beside the benchmark files")
    named = {label for row in PAPER["rows"] for label in row.get("paper", [])}
    headings = {name: count for row in PAPER["rows"] for name, count in row.get("headings", {}).items()}
    floats = floats_of(paper.read_text())
    assert len(floats) == len(re.findall(r"\\begin\{(?:table|figure|wrapfigure)\}", paper.read_text())) > 40
    unlabelled = [heading for heading, labels in floats if not labels & named]
    assert {heading: unlabelled.count(heading) for heading in unlabelled} == headings
    assert named <= {label for _, labels in floats for label in labels}


def test_every_row_is_on_the_page():
    page = (ROOT / "docs/paper.md").read_text().replace("\\|", "|")
    assert [command for command in COMMANDS if f"`{command}`" not in page] == []
    assert [row["name"] for row in PAPER["rows"] if row["name"] not in page] == []


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_of_the_paper_page_parses(command, monkeypatch):
    import typer.main

    monkeypatch.chdir(ROOT)
    lap, *words = shlex.split(command)
    assert lap == "lap"
    _parsed(typer.main.get_command(app), words)


@pytest.mark.long
@pytest.mark.parametrize("command", PAPER["trainings"].values())
def test_a_training_of_the_paper_page_starts(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("LAP_RUNS", str(tmp_path))
    code, out, err = run_main(capsys, *shlex.split(command)[1:], "--dry-run", "--gpu", "l40")
    assert code == 0, err
    assert "cells" in out


def test_a_key_is_explained_and_a_misspelt_key_refused(capsys):
    code, out, _ = run_main(capsys, "recipes", "train.micro_batch")
    assert code == 0
    assert "train.micro_batch: whole number (at least 1); required" in out
    code, _, err = run_main(capsys, "recipes", "train.mirco_batch")
    assert code == 2
    assert "train.micro_batch" in err


def test_every_key_has_a_meaning():
    from lapcli.recipe.reference import reference

    assert [key.path for key in reference() if not key.meaning] == []


@pytest.mark.long
def test_the_site_is_built(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "paper.html", "reference/recipe.html", "search/search_index.json"):
        assert (tmp_path / "site" / page).is_file()


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    """With a kernel if nbclient is installed, else cell by cell."""
    text = (ROOT / "docs/quickstart.ipynb").read_text()
    monkeypatch.setenv("LAP_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("MPLBACKEND", "agg")
    try:
        import nbformat
        from nbclient import NotebookClient
    except ImportError:
        names: dict[str, object] = {}
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), "quickstart.ipynb", "exec"), names)
        top1 = names["top1"]
        assert len(top1) == 6
        assert all(0 < value <= 1 for value in top1.values())
        return
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "n = 3" in printed
    assert "changed: True  restored: True" in printed
