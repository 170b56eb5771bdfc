"""Effects of factors on the gain: a design worked by hand, and against a regression on the coded factors."""

import numpy as np
import pytest
from report_support import write_run
from support import run_main

from lapcli.report.assemble import report_on
from lapcli.report.effects import _corners, contrast

#: Gain of two Laplacian heads by (layers, drop path), two seeds each; corners' means 1, 3, 2, 8.
GAINS = {(2, 0.0): (0.0, 2.0), (2, 0.2): (2.5, 3.5), (6, 0.0): (2.0, 2.0), (6, 0.2): (7.0, 9.0)}


@pytest.fixture
def runs(tmp_path):
    for (layers, drop_path), gains in GAINS.items():
        for seed, gain in enumerate(gains):
            for heads in (0, 2):
                change = [f"model.layers={layers}", f"model.drop_path={drop_path}"]
                score = 0.5 + 0.01 * seed + (gain / 100 if heads else 0)
                name = f"d{layers}-{drop_path}-{heads}L-{seed}"
                write_run(tmp_path, name, heads=heads, seed=seed, change=change, scores={"top1": score})
    return tmp_path


def test_the_effects_are_those_worked_by_hand(runs, capsys):
    arguments = ["report", "--runs-dir", str(runs), "--columns", "top1", "--effects", "model.layers,model.drop_path"]
    code, out, err = run_main(capsys, *arguments)
    assert code == 0, err
    rows = [line for line in out.splitlines() if line.startswith(("all", "layers", "drop path"))]
    # Means 1, 3, 2, 8: 3.5 in all; (2 + 8)/2 - (1 + 3)/2 = 3 for the layers; (3 + 8)/2 - (1 + 2)/2 = 4 for drop path.
    assert "+3.50" in rows[0]
    assert "2: +2.00" in rows[1]
    assert "6: +5.00" in rows[1]
    assert "+3.00 [" in rows[1]
    assert "0.0: +1.50" in rows[2]
    assert "0.2: +5.50" in rows[2]
    assert "+4.00 [" in rows[2]
    assert "4 corners, 8 paired differences" in out


def test_the_interval_is_that_of_the_saturated_regression(runs):
    """With a term for each corner the residuals are those within corners."""
    from scipy import stats

    grids = report_on([], runs, columns=["top1"]).grids
    (row,) = {row for grid in grids for row in grid.rows if row.label == "2"}
    corners = _corners(grids, "top1", row, None)
    signs = [1 if corner.grid.identity["model.layers"] == "6" else -1 for corner in corners]
    found = contrast(corners, [sign / 2 for sign in signs])
    y, A, B = [], [], []
    for (layers, drop_path), gains in GAINS.items():
        for gain in gains:
            y.append(gain / 100)
            A.append(1 if layers == 6 else -1)
            B.append(1 if drop_path else -1)
    X = np.column_stack([np.ones(8), A, B, np.multiply(A, B)])
    coefficients, residual, *_ = np.linalg.lstsq(X, np.array(y), rcond=None)
    error = np.sqrt(residual[0] / 4 * np.linalg.inv(X.T @ X)[1, 1])
    assert found.value == pytest.approx(2 * coefficients[1])
    half = stats.t.ppf(0.975, 4) * 2 * error
    assert found.interval == pytest.approx((found.value - half, found.value + half))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(coefficients[1] / error), 4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [("model.width", "model.width needs two values over these runs, but has 64"), ("model.depth", "has none")],
)
def test_a_factor_has_two_values(runs, capsys, keys, message):
    code, _, err = run_main(capsys, "report", "--runs-dir", str(runs), "--columns", "top1", "--effects", keys)
    assert code == 2
    assert message in " ".join(err.split())


def test_effects_need_columns(runs, capsys):
    code, _, err = run_main(capsys, "report", "--runs-dir", str(runs), "--effects", "model.layers")
    assert (code, "--effects needs --columns" in err) == (2, True)
