"""Figures say what they show: every panel with data has named axes, and runs are labelled by their Laplacian heads."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from lapcli.analysis import figure_parts, figures
from lapcli.analysis.analyze import Analysis, Measured
from lapcli.analysis.features import FeatureMap
from lapcli.analysis.found import Found
from lapcli.analysis.measure import Settings, chosen_layers
from lapcli.analysis.subjects import Subject
from lapcli.heads.plan import HeadPlan
from lapcli.runtime.errors import UsageError

rng = np.random.default_rng(0)


def found(what):
    """A result of the right form with made-up numbers."""
    shares = {f"{part}_share{s}": 1 / 3 for part in figures.PARTS for s in ("", "_by_example")}
    nc = {f"{n}_{of}" if n.startswith("nc2") else n: 0.3 for n in figures.NC for of in figures._OF}
    points = {"place": rng.normal(size=(30, 2)), "class": np.repeat([0, 1, 2], 10)}
    corners = {"corner_x": np.array([1.0, -1, 0]), "corner_y": np.array([-1.0, -1, 1]), "corner_class": np.arange(3)}
    heads = {name: rng.uniform(-1, 1, 4) for name in figures.UPDATES} | {"is_laplacian": np.array([0.0, 0, 1, 1])}
    picture = FeatureMap("photo.png", np.zeros((8, 8, 3), dtype=np.uint8), rng.random((4, 4, 3)))
    return {
        "spectrum": Found(
            {"k_0.9": 2.0, "k_0.99": 4.0, "k_0.999": None},
            {"eigenvalue_mean": np.array([9.0, 3, 1, 0]), "eigenvalue_std": np.array([1.0, 1, 2, 0])},
        ),
        "anova": Found(shares),
        "cossim": Found({"cosine_similarity": 0.4, "cosine_similarity_std": 0.1}),
        "snr": Found({"snr": 1.4, "snr_std": 0.1}),
        "collapse": Found(nc),
        "simplex": Found({"tokens_shown": 30}, corners, points),
        "pca": Found({"tokens_shown": 30, "variance_share_1": 0.5, "variance_share_2": 0.2}, {}, points),
        "updates": Found({}, heads),
        "features": Found({"pictures": 1}, pictures=[picture]),
    }[what]


def analysis(what, heads=(0, 2, 4), layers=(0, 1), weights="trained"):
    runs = []
    for number, k in enumerate(heads):
        subject = Subject(f"run{number}", weights, 1, "0" * 64, "image classification", lambda: None)
        results = {layer: found(what) for layer in layers}
        runs.append(Measured(subject, HeadPlan((k, k), 4), results, 1, 1, "", "", "validation", ["a", "b", "c"]))
    return Analysis(what, Settings(), runs)


@pytest.mark.parametrize("layers", [(1,), (0, 1)])
@pytest.mark.parametrize("what", figures._DRAW)
def test_axes_are_named(what, layers):
    with mpl.rc_context(figures.STYLE):
        figure = figures._DRAW[what](analysis(what, layers=layers))
    drawn = [axes for axes in figure.axes if axes.has_data() and not axes.images]
    assert bool(drawn) != (what == "features")
    assert any(axes.get_ylabel() for axes in drawn) or not drawn
    bottom = max((axes.get_subplotspec().rowspan.stop for axes in drawn), default=0)
    for axes in drawn:
        if axes.get_subplotspec().rowspan.stop == bottom:
            assert axes.get_xlabel()


@pytest.mark.parametrize("what", figures._DRAW)
def test_runs_are_labelled_by_their_heads(what):
    with mpl.rc_context(figures.STYLE):
        figure = figures._DRAW[what](analysis(what, layers=(1,)))
    shown = {text.get_text() for text in figure.findobj(mpl.text.Text)}
    for label in ("0L", "2L", "4L"):
        assert any(text.startswith(label) for text in shown), shown


def test_labels_tell_runs_apart():
    both = Analysis("snr", Settings(), [*analysis("snr").runs, *analysis("snr", weights="untrained").runs])
    assert figure_parts.labels(both.runs) == ["0L", "2L", "4L", "0L, untrained", "2L, untrained", "4L, untrained"]
    assert figure_parts.labels(analysis("snr", heads=(2, 2)).runs) == ["2L (run0)", "2L (run1)"]


def test_colours_differ_in_brightness():
    """Lines can be told apart without colour: their grey values are in order and apart."""
    grey = []
    for style in figure_parts.styles(analysis("snr", heads=(0, 1, 2, 3, 4)).runs):
        red, green, blue = mpl.colors.to_rgb(style["color"])
        grey.append(0.299 * red + 0.587 * green + 0.114 * blue)
    assert (np.diff(grey) > 0.08).all()


def test_the_same_numbers_give_the_same_files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        figures.draw(analysis("cossim"), tmp_path / name)
    for form in ("png", "svg"):
        first, second = ((Path(tmp_path) / name / f"cossim.{form}").read_bytes() for name in ("one", "two"))
        assert first == second


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last", [11]),
        ("all", list(range(12))),
        ("3", [3]),
        ("-1", [11]),
        ("0,5,11", [0, 5, 11]),
        ("9-11,2", [2, 9, 10, 11]),
    ],
)
def test_layers_by_name(text, expected):
    assert chosen_layers(text, "last", 12) == expected


def test_layers_spread_over_the_depth_end_with_the_last():
    assert chosen_layers(None, "spread", 12) == [1, 3, 5, 7, 9, 11]
    assert chosen_layers(None, "spread", 4) == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="layers 0 to 3"):
        chosen_layers("4", "last", 4)
