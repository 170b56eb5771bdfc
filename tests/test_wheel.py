"""The wheel, installed without a checkout: the command works and finds its recipes."""

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from report_support import write_run
from support import ROOT, run_process

pytestmark = pytest.mark.long  # builds and installs the package


def run(*words: str, cwd: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = run_process(list(words), cwd=cwd, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """`lap` in an environment with the wheel; its dependencies are those of the test environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = run("git", "ls-files", "-z", "lapcli", "recipes", "pyproject.toml", "setup.py", "README.md", cwd=ROOT)
    for name in files.split("\0")[:-1]:  # a copy: building leaves folders beside the sources
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), ".", cwd=source)
    run(sys.executable, "-m", "venv", str(folder / "environment"), cwd=folder)
    python = folder / "environment" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    run(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=folder)
    packages = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "environment" / "bin" / "lap"


def test_shipped_recipes_are_found_by_name_from_any_folder(installed, tmp_path):
    text = run(str(installed), "train", "quickstart", "--dry-run", cwd=tmp_path)
    assert "2 of 4" not in text  # heads are counted over all layers
    assert "6 of 12 Laplacian" in text
    where = run(str(installed.parent / "python"), "-c", "import lapcli; print(lapcli.__file__)", cwd=tmp_path)
    assert str(installed.parent.parent) in where  # the wheel's own, not the checkout


def test_a_report_has_its_page_and_the_papers_claims_and_numbers(installed, tmp_path):
    write_run(tmp_path / "runs", "cifar", "vitb_cifar10", scores={"top1": 0.9})
    run(str(installed), "report", "--format", "html", cwd=tmp_path)
    page = (tmp_path / "runs" / "report.html").read_text()
    assert page.partition("claims were not run</summary>")[2].partition("</ul>")[0].count("<li>") > 20
    assert "paper 95.35 ± 0.16" in page
