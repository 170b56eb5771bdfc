"""The paper's claims, judged on run directories with the paper's own numbers, a part of them, or noise."""

from collections import Counter
from copy import copy

import numpy as np
import pytest

from lapcli.report.claims import claims, judge, judge_all
from lapcli.report.paper import CLASSIFICATION, LANGUAGE, families

NULL_DRAWS = 200


def changed(grids, change):
    """The grids with other numbers: `change` receives a copy of each wide frame."""
    made = []
    for grid in grids:
        other = copy(grid)
        other.wide = change(grid, grid.wide.copy())
        made.append(other)
    return made


def statuses(grids):
    return {verdict.claim.key: verdict.status for verdict in judge_all(grids)}


def status(claim, grids):
    return judge(claim, families(grids)).status


def test_the_paper_numbers_reproduce_its_claims(paper_grids):
    assert statuses(paper_grids) == {claim.key: "reproduced" for claim in claims()}


def test_mirrored_numbers_reproduce_no_claim(paper_grids):
    """Every number mirrored at the baseline of the same seed."""

    def mirror(_, wide):
        base = wide.loc["0"].reindex(wide.index.get_level_values("seeds")).to_numpy()
        return 2 * base - wide

    found = statuses(changed(paper_grids, mirror))
    assert {"reproduced", "not run"} & set(found.values()) == set()
    assert Counter(found.values())["not"] >= 15


def test_one_seed_is_undecided(paper_grids):
    """A single number gives no noise estimate to compare a difference with, however large."""
    found = judge_all(changed(paper_grids, lambda grid, wide: wide[wide.index.get_level_values("seeds").str[0] == "1"]))
    assert {verdict.status for verdict in found} == {"undecided"}, [(v.claim.key, v.status) for v in found]
    assert {verdict.words for verdict in found} == {"undecided at 1 seed"}


def test_equal_rows_reproduce_no_claim(paper_grids):
    found = statuses(changed(paper_grids, lambda grid, wide: wide * 0 + 0.4))
    assert "reproduced" not in found.values()


def test_a_claim_needs_the_data_set_of_the_paper(paper_grids):
    """A claim is not reproduced without a head count, data set or drop path that it covers."""
    for heads in (0, 12, 10, 6):
        kept = changed(paper_grids, lambda grid, wide, heads=heads: wide[wide.index.get_level_values(0) != str(heads)])
        for claim in claims():
            if heads in claim.heads:
                assert status(claim, kept) in ("partly", "undecided", "not run"), (claim.key, heads)
    for claim in claims():
        if len(claim.scopes) > 1:
            kept = [grid for grid in paper_grids if grid.first.data_set != claim.scopes[0]]
            assert status(claim, kept) == "partly"
    kept = [grid for grid in paper_grids if grid.first.values.get("model.drop_path") in (None, 0.1)]
    assert statuses(kept)["every-drop-path"] == "partly"


@pytest.mark.long
def test_noise_alone_reproduces_a_claim_in_at_most_one_of_twenty_draws(paper_grids):
    """All rows drawn around the baseline's mean, with the paper's deviation; or a hundredth of the mean without one."""
    draw = np.random.default_rng(0)
    spread = {
        task: np.sqrt(np.mean([3 * s**2 for _, s in numbers.values()])) / 100 for task, numbers in LANGUAGE.items()
    }
    top1 = {
        name: np.sqrt(np.mean([s**2 for _, s in numbers.values()])) / 100 for name, numbers in CLASSIFICATION.items()
    }

    def null(grid, wide):
        level = wide.loc["0"].mean()
        deviation = (0.01 * level.abs()).replace(0, 0.01)
        for name in wide:
            deviation[name] = top1[grid.first.data_set] if name == "top1" else spread.get(name, deviation[name])
        return wide * 0 + level + draw.standard_normal(wide.shape) * deviation.to_numpy()

    reproduced = Counter()
    for _ in range(NULL_DRAWS):
        found = statuses(changed(paper_grids, null))
        reproduced.update(key for key, status in found.items() if status == "reproduced")
    assert {key: count for key, count in reproduced.items() if count > 0.05 * NULL_DRAWS} == {}
