"""Figures are labelled: every panel with data has named axes, and runs are labelled by their Laplacian heads."""

import re
from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest

from lapcli.analysis.analyze import Analysis, ModelResult
from lapcli.analysis.analyzed_models import STOCK_GIVES, AnalyzedModel
from lapcli.analysis.drawing import STYLE, labels, lines_of
from lapcli.analysis.examples import DataOrigin
from lapcli.analysis.measurement import LayerResult, Settings
from lapcli.analysis.measurements import MEASUREMENTS, anova, collapse, updates
from lapcli.analysis.measurements.features import FeatureMap
from lapcli.analysis.measurements.heads import OV_QUANTITIES, SINK_QUANTITIES
from lapcli.heads.plan import head_plan

rng = np.random.default_rng(0)


def made_up(what):
    """A well-formed result with made-up numbers."""
    shares = {f"{part}_share": 1 / 3 for part in anova.PARTS}
    nc = {f"{n}_{of}" if n.startswith("nc2") else n: 0.3 for n in collapse.TITLES for of in collapse.NC2_VECTORS}
    points = {"place": rng.normal(size=(30, 2)), "class": np.repeat([0, 1, 2], 10)}
    corners = {"corner_x": np.array([1.0, -1, 0]), "corner_y": np.array([-1.0, -1, 1]), "corner_class": np.arange(3)}
    heads = {name: rng.uniform(-1, 1, 4) for name in updates.QUANTITIES} | {"is_laplacian": np.array([0.0, 0, 1, 1])}
    operators = {"operators": ["attention", "attention", "mix", "mix"]}
    picture = FeatureMap("photo.png", np.zeros((8, 8, 3), dtype=np.uint8), rng.random((4, 4, 3)))
    return {
        "spectrum": LayerResult(
            {"k_0.9": 2.0, "k_0.99": 4.0, "k_0.999": None},
            {"eigenvalue_mean": np.array([9.0, 3, 1, 0]), "eigenvalue_std": np.array([1.0, 1, 2, 0])},
        ),
        "anova": LayerResult(shares),
        "cossim": LayerResult({"cosine_similarity": 0.4}),
        "snr": LayerResult({"snr": 1.4}),
        "collapse": LayerResult(nc),
        "simplex": LayerResult({"tokens_shown": 30}, corners, points),
        "pca": LayerResult({"tokens_shown": 30, "variance_share_1": 0.5, "variance_share_2": 0.2}, {}, points),
        "updates": LayerResult({}, heads, words={"operators": ["attention", "gate", "laplacian", "laplacian"]}),
        "sinks": LayerResult({}, {name: rng.uniform(0, 1, 4) for name in SINK_QUANTITIES}, words=operators),
        "ov": LayerResult({}, {name: rng.uniform(-1, 1, 4) for name in OV_QUANTITIES}, words=operators),
        "mixing": LayerResult({}, {"mix_alpha": np.array([np.nan, np.nan, 0.1, -0.2])}, words=operators),
        "features": LayerResult({"pictures": 1}, pictures=[picture]),
    }[what]


def analysis(what, heads=(0, 2, 4), layers=(0, 1), weights="trained"):
    runs = []
    for number, k in enumerate(heads):
        model = AnalyzedModel(f"run{number}", weights, 1, "0" * 64, "classification", STOCK_GIVES, lambda: None)
        results = {layer: made_up(what) for layer in layers}
        runs.append(
            ModelResult(model, head_plan(k, 2, 4), results, 1, 1, DataOrigin("", "", "validation"), ["a", "b", "c"])
        )
    return Analysis(MEASUREMENTS[what], Settings(), runs)


@pytest.mark.parametrize("what", list(MEASUREMENTS))
def test_runs_are_labelled_by_their_heads(what):
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(analysis(what, layers=(1,)))
    shown = {text.get_text() for text in figure.findobj(mpl.text.Text)}
    for heads in (0, 2, 4):
        assert any(re.match(rf"{heads}L\b", text) for text in shown), shown


@pytest.mark.parametrize("what", ["anova", "collapse"])
def test_a_single_bar_is_not_drawn(what):
    assert MEASUREMENTS[what].draw(analysis(what, heads=(2,), layers=(1,))) is None
    assert MEASUREMENTS["spectrum"].draw(analysis("spectrum", heads=(2,), layers=(1,))).axes[1:] == []


@pytest.mark.parametrize("what", ["cossim", "anova"])
def test_seeds_of_one_recipe_become_one_line_with_error_bars(what):
    several = analysis(what, heads=(0, 0, 2, 2, 2), layers=(0, 1) if what == "cossim" else (1,))
    several.runs = [replace(run, model=replace(run.model, recipe=str(run.plan))) for run in several.runs]
    assert [(line.label, len(line.runs)) for line in lines_of(several.runs)] == [("0L, 2 seeds", 2), ("2L, 3 seeds", 3)]
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(several)
    bars = [bar for axes in figure.axes for bar in axes.containers if isinstance(bar, mpl.container.ErrorbarContainer)]
    assert bars
    assert all(bar.has_yerr for bar in bars)


def test_labels_tell_runs_apart():
    both = Analysis(
        MEASUREMENTS["snr"], Settings(), [*analysis("snr").runs, *analysis("snr", weights="untrained").runs]
    )
    assert labels(both.runs) == ["0L", "2L", "4L", "0L, untrained", "2L, untrained", "4L, untrained"]
    assert labels(analysis("snr", heads=(2, 2)).runs) == ["2L (run0)", "2L (run1)"]


@pytest.mark.parametrize("what", ["sinks", "pca"])
def test_titles_tell_runs_of_one_plan_apart(what):
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(analysis(what, heads=(2, 2), layers=(1,)))
    titles = {axes.get_title() for axes in figure.axes}
    for name in ("run0", "run1"):
        assert any(title.startswith(f"2L\n({name})") for title in titles), titles
