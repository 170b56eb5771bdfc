"""Head plans, worked by hand."""

import pytest

from lapcli.heads.plan import head_plan


@pytest.mark.parametrize(
    ("spec", "layers", "heads", "per_layer"),
    [
        (0, 3, 4, (0, 0, 0)),
        (4, 3, 4, (4, 4, 4)),  # all heads may be Laplacian
        ([0, 0, 3, 3], 4, 4, (0, 0, 3, 3)),
        ("linear(0, 10)", 6, 10, (0, 2, 4, 6, 8, 10)),
        ("linear(0, 5)", 3, 6, (0, 3, 5)),  # two and a half, which Python would round to two
        ("linear(3, 9)", 1, 10, (3,)),  # one layer is the first
        ("linear(0, 10)", 12, 10, (0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10)),
        ({"layers": "2-3", "heads": 4}, 6, 4, (0, 0, 4, 4, 0, 0)),
        ({"layers": "4 - 5", "heads": 1}, 6, 4, (0, 0, 0, 0, 1, 1)),
    ],
)
def test_every_form_by_hand(spec: object, layers: int, heads: int, per_layer: tuple[int, ...]) -> None:
    plan = head_plan(spec, layers, heads)  # type: ignore[arg-type]
    assert (plan.per_layer, plan.heads, plan.is_laplacian) == (per_layer, heads, True)
    assert plan.total == sum(per_layer)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (5, "layer 0 has 4 heads, so 0 to 4 can be Laplacian, got 5"),
        (2.5, "0 to 4 can be Laplacian, got 2.5"),
        ("five", "expected a number, a list, `linear(a, b)` or {layers:, heads:}, got 'five'"),
        ([1, 2], "a list needs one number for each of the 3 layers, got 2"),
        ({"layers": "2-1", "heads": 1}, "layers: 2-1 is not within the 3 layers 0 to 2"),
        ({"laplacian": {"layers": 1}}, "laplacian needs a number of heads, such as {laplacian: {heads: 2}}"),
        ({"layers": 1, "heads": 7}, "layer 1 has 4 heads, so 0 to 4 can be Laplacian, got 7"),
    ],
)
def test_an_invalid_plan_is_refused_with_the_expected_form(spec: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared below
        head_plan(spec, layers=3, heads=4)  # type: ignore[arg-type]
    assert str(caught.value).endswith(message)


def test_labels_are_short_and_distinguish_plans():
    one, two = {"laplacian": 1, "exclusive": 2}, {"exclusive": 2, "laplacian": 1}
    plans = {
        "2": 2,
        "[0, 1, 1, 2]": [0, 1, 1, 2],
        "1 laplacian, 2 exclusive": one,
        "2 exclusive, 1 laplacian": two,
        "layer 0: 1 laplacian, 2 exclusive": [one, {}, {}, {}],
        "layers 0-1: 1 laplacian, 2 exclusive; layer 3: 2 exclusive, 1 laplacian": [one, one, {}, two],
        "layers 0-2: 1 mix (alpha 0.25); layer 3: 1 mix": [{"mix": {"heads": 1, "alpha": 0.25}}] * 3 + [{"mix": 1}],
    }
    for label, spec in plans.items():
        assert head_plan(spec, 4, 4).label() == label
