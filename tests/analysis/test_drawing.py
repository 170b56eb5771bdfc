"""Figures say what they show: every panel with data has named axes, and runs are labelled by their Laplacian heads."""

import re
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from lapcli.analysis.analyze import Analysis, ModelResult
from lapcli.analysis.analyzed_models import STOCK_GIVES, AnalyzedModel
from lapcli.analysis.drawing import STYLE, forms_of, labels, lines_of, save_figure
from lapcli.analysis.examples import class_names
from lapcli.analysis.measurement import LayerResult, Settings
from lapcli.analysis.measurements import MEASUREMENTS, anova, collapse, sinks, updates
from lapcli.analysis.measurements.features import FeatureMap
from lapcli.heads.plan import head_plan
from lapcli.report import figures
from lapcli.runtime.errors import UsageError

rng = np.random.default_rng(0)


def made_up(what):
    """A result of the right form with made-up numbers."""
    shares = {f"{part}_share{s}": 1 / 3 for part in anova.PARTS for s in ("", "_by_example")}
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
        "cossim": LayerResult({"cosine_similarity": 0.4, "cosine_similarity_std": 0.1}),
        "snr": LayerResult({"snr": 1.4, "snr_std": 0.1}),
        "collapse": LayerResult(nc),
        "simplex": LayerResult({"tokens_shown": 30}, corners, points),
        "pca": LayerResult({"tokens_shown": 30, "variance_share_1": 0.5, "variance_share_2": 0.2}, {}, points),
        "updates": LayerResult({}, heads, words={"operators": ["attention", "gate", "laplacian", "laplacian"]}),
        "sinks": LayerResult({}, {name: rng.uniform(0, 1, 4) for name in sinks.QUANTITIES}, words=operators),
        "mixing": LayerResult({}, {"mix_alpha": np.array([np.nan, np.nan, 0.1, -0.2])}, words=operators),
        "features": LayerResult({"pictures": 1}, pictures=[picture]),
    }[what]


def analysis(what, heads=(0, 2, 4), layers=(0, 1), weights="trained"):
    runs = []
    for number, k in enumerate(heads):
        model = AnalyzedModel(f"run{number}", weights, 1, "0" * 64, "classification", STOCK_GIVES, lambda: None)
        results = {layer: made_up(what) for layer in layers}
        runs.append(ModelResult(model, head_plan(k, 2, 4), results, 1, 1, "", "", "validation", ["a", "b", "c"]))
    return Analysis(MEASUREMENTS[what], Settings(), runs)


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
@pytest.mark.parametrize("what", list(MEASUREMENTS))
def test_axes_are_named(what, layers):
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(analysis(what, layers=layers))
    drawn = [axes for axes in figure.axes if axes.has_data() and not axes.images]
    assert bool(drawn) != (what == "features")
    assert any(axes.get_ylabel() for axes in drawn) or not drawn
    bottom = max((axes.get_subplotspec().rowspan.stop for axes in drawn), default=0)
    for axes in drawn:
        if axes.get_subplotspec().rowspan.stop == bottom:
            assert axes.get_xlabel()


@pytest.mark.parametrize("what", list(MEASUREMENTS))
def test_runs_are_labelled_by_their_heads(what):
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(analysis(what, layers=(1,)))
    shown = {text.get_text() for text in figure.findobj(mpl.text.Text)}
    for heads in (0, 2, 4):
        assert any(re.match(rf"{heads}L\b", text) for text in shown), shown


def test_an_axis_does_not_zoom_into_noise():
    same = analysis("cossim", layers=(0, 1))
    same.runs[0].layers[0].values["cosine_similarity"] = 0.4001
    with mpl.rc_context(STYLE):
        low, high = MEASUREMENTS["cossim"].draw(same).axes[0].get_ylim()
    assert high - low >= 0.1 * 0.4


def test_forms(tmp_path):
    paths = save_figure(analysis("snr"), tmp_path, forms_of("pdf,png"))
    assert [path.suffix for path in paths] == [".pdf", ".png"]
    assert (tmp_path / "snr.pdf").read_bytes().startswith(b"%PDF")
    with pytest.raises(UsageError, match="jpeg"):
        forms_of("jpeg")


@pytest.mark.parametrize("what", ["anova", "collapse"])
def test_a_single_bar_is_left_to_the_table(what):
    assert MEASUREMENTS[what].draw(analysis(what, heads=(2,), layers=(1,))) is None
    assert MEASUREMENTS["spectrum"].draw(analysis("spectrum", heads=(2,), layers=(1,))).axes[1:] == []


@pytest.mark.parametrize("what", ["cossim", "spectrum", "collapse", "anova"])
def test_seeds_of_a_recipe_are_one_line_with_error_bars(what):
    several = analysis(what, heads=(0, 0, 2, 2, 2), layers=(0, 1) if what == "cossim" else (1,))
    several.runs = [replace(run, model=replace(run.model, recipe=str(run.plan))) for run in several.runs]
    assert [(line.label, len(line.runs)) for line in lines_of(several.runs)] == [("0L, 2 seeds", 2), ("2L, 3 seeds", 3)]
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(several)
    bars = [bar for axes in figure.axes for bar in axes.containers if isinstance(bar, mpl.container.ErrorbarContainer)]
    assert bars
    assert all(bar.has_yerr for bar in bars)


def test_wordnet_ids_have_names():
    names = class_names(["n01440764", "n02012849", "n03126707", "n99999999"])
    assert names == ["tench", "crane (n02012849)", "crane (n03126707)", "n99999999"]  # the bird and the machine
    assert class_names(["cat", "n01440764"]) == ["cat", "n01440764"]


def test_colours_stay_apart_for_colour_blind_readers():
    """Machado et al. (2009), full strength: in linear light, a matrix for each kind of colour blindness."""
    blind = {
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    }
    rgb = np.array([mpl.colors.to_rgb(colour) for colour in figures.COLOURS[:6]])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    for matrix in blind.values():
        seen = np.clip(linear @ np.array(matrix).T, 0, 1) ** (1 / 2.2)
        apart = np.linalg.norm(seen[:, None] - seen[None], axis=2)[np.triu_indices(len(seen), 1)]
        assert apart.min() > 0.1


def test_tokens_that_do_not_vary_have_no_spectrum_to_draw(tmp_path):
    """One token in each sequence (`--tokens class`): nothing fits a logarithmic axis."""
    constant = LayerResult(
        {"k_0.9": None, "k_0.99": None, "k_0.999": None},
        {"eigenvalue_mean": np.zeros(4), "eigenvalue_std": np.zeros(4)},
    )
    nothing = analysis("spectrum", layers=(0, 1))
    for run in nothing.runs:
        run.layers.update({0: constant, 1: constant})
    assert save_figure(nothing, tmp_path) == []
    some = analysis("spectrum", layers=(0, 1))
    for run in some.runs:
        run.layers[1] = constant
    assert len(save_figure(some, tmp_path)) == 2  # k_0.99 of the other layer is shown


def test_labels_tell_runs_apart():
    both = Analysis(
        MEASUREMENTS["snr"], Settings(), [*analysis("snr").runs, *analysis("snr", weights="untrained").runs]
    )
    assert labels(both.runs) == ["0L", "2L", "4L", "0L, untrained", "2L, untrained", "4L, untrained"]
    assert labels(analysis("snr", heads=(2, 2)).runs) == ["2L (run0)", "2L (run1)"]


def test_a_label_says_when_its_numbers_are_averages_over_layers():
    plans = {
        "1.5L on average": head_plan([0, 3], 2, 4),
        "2 gate": head_plan({"gate": 2}, 2, 4),
        "0.5 laplacian, 1 gate on average": head_plan([{"laplacian": 1}, {"gate": 2}], 2, 4),
        "1 laplacian, 1 gate on average": head_plan([{"laplacian": 2}, {"gate": 2}], 2, 4),
    }
    (run,) = analysis("snr", heads=(0,)).runs
    assert labels([replace(run, plan=plan) for plan in plans.values()]) == list(plans)


@pytest.mark.parametrize("what", ["features", "sinks", "pca", "simplex"])
def test_titles_tell_runs_of_one_plan_apart(what):
    with mpl.rc_context(STYLE):
        figure = MEASUREMENTS[what].draw(analysis(what, heads=(2, 2), layers=(1,)))
    titles = {axes.get_title() for axes in figure.axes}
    for name in ("run0", "run1"):
        assert any(title.startswith(f"2L\n({name})") for title in titles), titles


def test_colours_differ_in_brightness():
    """Lines can be told apart without colour: their grey values are in order and apart."""
    grey = []
    for line in lines_of(analysis("snr", heads=(0, 1, 2, 3, 4)).runs):
        red, green, blue = mpl.colors.to_rgb(line.style["color"])
        grey.append(0.299 * red + 0.587 * green + 0.114 * blue)
    assert (np.diff(grey) > 0.08).all()


def test_the_same_numbers_give_the_same_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_figure(analysis("cossim"), tmp_path / name)
    for form in ("png", "svg"):
        first, second = ((Path(tmp_path) / name / f"cossim.{form}").read_bytes() for name in ("one", "two"))
        assert first == second
