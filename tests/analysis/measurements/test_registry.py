"""A measurement is one file or one call from outside: help, `all`, options, output and reports then include it."""

import sys

from support import run_process


def test_help_and_usage_errors_need_no_torch(tmp_path):
    """Run in a fresh process, with nothing imported yet."""
    lines = [
        ["analyze", "-h"],
        ["analyze", "spectrun"],
        ["analyze", "spectrum", "--run", "nobody"],
        ["analyze", "cossim", "--classes", "3"],
        ["analyze", "features", "timm:test_vit", "--image", "nowhere.png"],
    ]
    code = f"""
import sys
from lapcli.cli import main
codes = []
for line in {lines!r}:
    sys.argv[1:] = line
    try: main()
    except SystemExit as stop: codes.append(stop.code)
print(codes, *sys.modules, file=sys.stderr)
"""
    done = run_process([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(str([0] + [2] * 4))
    assert not set(last.split()) & {"torch", "timm", "matplotlib", "sklearn"}
    assert "nowhere.png" in done.stderr
