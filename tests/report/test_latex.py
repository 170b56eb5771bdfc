"""The LaTeX of `lap report`, through a real LaTeX."""

import re
import shutil

import pytest
from report_support import write_run
from support import run_main, run_process


def test_tables_compile(capsys, tmp_path, monkeypatch):
    """Runs of two recipes with letters that mean something to LaTeX, a gap, and the paper's table beside them."""
    if shutil.which("pdflatex") is None:
        pytest.skip("there is no pdflatex here (`apt-get install texlive-latex-recommended`): nothing was compiled")
    for heads, seed in ((0, 0), (0, 1), (2, 0), (2, 1), (4, 0)):
        scores = {"top1": 0.8 + heads / 100 + seed / 50, "my_task#1": 0.3} if heads < 4 else None
        change = ["data.train=a_{b}^c~&%$#folder"]
        write_run(tmp_path / "runs", f"d_{heads}L_{seed}", heads=heads, seed=seed, change=change, scores=scores)
        write_run(tmp_path / "runs", f"b_{heads}L_{seed}", heads=heads, seed=seed, scores=scores)
    tables = []
    for extra in ((), ("--paper", "table1"), ("--paper", "table2")):
        code, out, err = run_main(capsys, "report", "--runs-dir", str(tmp_path / "runs"), "--format", "latex", *extra)
        assert code == 0, err
        tables.append(out)
    assert "% needs \\usepackage{booktabs}" in tables[0]
    document = "\n".join(
        ["\\documentclass{article}", "\\usepackage{booktabs}", "\\begin{document}", *tables, "\\end{document}"]
    )
    (tmp_path / "report.tex").write_text(document)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "-no-shell-escape", "report.tex"]
    done = run_process(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    assert not re.search(r"Missing character|undefined", done.stdout)
