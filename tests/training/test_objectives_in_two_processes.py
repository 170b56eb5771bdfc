"""Two processes make the same updates as one, for every kind: with accumulation, in bf16 and, for a GPT, compiled."""

import json
from typing import Any

import pytest
from objectives_support import COMBINATIONS, OPTIONS, TEXT, build, updates_of_a_rank
from support import exit_code, process

# The remaining difference is rounding: sums in another order and, in bf16, matmuls of other sizes.
# bf16 has 8 bits, and Muon carries the rounding of one step into the next: half a unit, 2^-9. A real
# error would show in float32 too, where the tolerance is 1e-5.
TOLERANCE = {"accumulation": 1e-5, "bf16": 2**-9, "compile": 1e-5}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, shared_cache) -> list[dict[str, Any]]:
    """Results of one process alone, and of each of two."""
    folder = tmp_path_factory.mktemp("kinds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        build("language_model", folder)  # the tokenizer, once for all of them
        build("packed_chat", folder)
        places = [(0, 1), (0, 2), (1, 2)]
        results = [folder / f"{rank}-of-{size}.json" for rank, size in places]
        children = [
            process(updates_of_a_rank, rank, size, str(folder), str(result), str(shared_cache))
            for (rank, size), result in zip(places, results, strict=True)
        ]
        for child in children:
            child.start()
        assert [exit_code(child, 600) for child in children] == [0, 0, 0]
    return [json.loads(result.read_text()) for result in results]


@pytest.mark.parametrize(("kind", "option"), COMBINATIONS)
def test_two_processes_make_the_same_updates_as_one(found: list[dict[str, Any]], kind: str, option: str) -> None:
    one, first, second = (results[f"{kind} {option}"] for results in found)
    assert first == second
    if option == "compile":
        # Gathering a block's weights breaks the graph: a sharded model has a few graphs per block, never one per step.
        assert 0 < one["graphs"] <= first["graphs"] <= one["graphs"] + 2 * first["blocks"]
    else:
        assert one["sums"] == first["graphs"] == one["graphs"] == 0
        assert first["waits"] == one["waits"] == (1 if kind in TEXT else 0)  # not counted where images are read
        # Loss, norms, counts and the stop flag are one all-reduce; Sinkhorn-Knopp takes a maximum and three sums for
        # each of two kinds of targets in every micro-step.
        balancing = 8 * OPTIONS[option]["batch"] // 8 if kind == "self_supervised" else 0
        assert first["sums"] == 1 + balancing
    tolerance = TOLERANCE[option]
    if (kind, option) == ("self_supervised", "bf16"):
        tolerance *= 2  # its tokens are bf16 between blocks too
    assert first["losses"] == pytest.approx(one["losses"], rel=tolerance)
    assert first["norms"] == pytest.approx(one["norms"], rel=5 * tolerance)
    # The updates change the loss by far more, so gradients that are not averaged would show.
    changes = [abs(after / before - 1) for before, after in zip(one["losses"], one["losses"][1:], strict=False)]
    assert max(changes) > 10 * tolerance


def test_a_non_finite_loss_on_one_rank_stops_all_before_the_update(found: list[dict[str, Any]]) -> None:
    for results in found:
        assert "the loss is nan at step 4" in results["not finite"]["error"]
        assert results["not finite"]["unchanged"]
