"""Which layers a measurement looks at, and the classifier it is given."""

from types import SimpleNamespace

import pytest
from analysis_support import on_a_device_without_float64, vit

from lapcli.analysis.measurement import Settings, chosen_layers
from lapcli.analysis.measurements.collapse import Collapse
from lapcli.models.anatomy import anatomy_of
from lapcli.runtime.errors import UsageError


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


def test_the_classifier_of_a_model_on_a_device_without_float64(monkeypatch):
    model, _ = vit(0)
    expected = model.head.weight.detach().numpy().astype("float64")
    on_a_device_without_float64(model, monkeypatch)
    opened = SimpleNamespace(anatomy=anatomy_of(model), examples=SimpleNamespace(classes=["a", "b", "c"]))
    found = Collapse(opened, Settings()).classifier_CD()
    assert found.dtype == "float64"
    assert (found == expected).all()
