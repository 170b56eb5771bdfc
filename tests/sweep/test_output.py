"""What people see of a sweep."""

import io

from rich.console import Console
from sweep_support import train_cells, write_recipe

from lapcli.sweep.output import LiveTable, final_table
from lapcli.sweep.runner import CellStatus
from lapcli.sweep.sweep import sweep_from_options


def test_a_long_sweep_shows_what_runs_and_what_failed_and_counts_the_rest(tmp_path):
    sweep = sweep_from_options(write_recipe(tmp_path), {"seed": list(range(60))}, [], [])
    statuses = [CellStatus(cell) for cell in sweep.grids[0].cells()]
    statuses[40].state = "running"
    statuses[50].state, statuses[50].reason = "failed", "no room [/on] the disk\nmore"
    seen = io.StringIO()
    with LiveTable(Console(file=seen, force_terminal=True, width=100, height=15), tmp_path) as table:
        table.show(statuses)
    text = seen.getvalue()
    assert "tiny-seed40" in text
    assert "no room [/on] the disk" in text
    assert "tiny-seed59" not in text
    assert "58 waiting, 1 running, 1 failed" in text


def test_the_last_table_has_every_cell_with_its_numbers_and_the_whole_reason(tmp_path):
    sweep = sweep_from_options(write_recipe(tmp_path), {"seed": [0, 1]}, [], [])
    cells = sweep.grids[0].cells()
    train_cells(cells[:1], tmp_path)
    lines = final_table(
        [CellStatus(cells[0], "finished"), CellStatus(cells[1], "failed", reason="a\nb")], tmp_path
    ).splitlines()
    assert lines[1].split()[:4] == ["tiny-seed0", "finished", "10/10", "loss"]
    assert lines[2].split() == ["tiny-seed1", "failed", "a"]
    assert lines[3:] == ["", "tiny-seed1 failed:", "  a", "  b"]
