"""Nothing is called better unless the interval over fresh seeds leaves out zero."""

import numpy as np
import pytest
from scipy import stats

from lapcli.report.statistics import compare
from lapcli.search.result import Confirmation
from lapcli.search.trials import CONTROL, SEARCH, Trial


def confirmation(winner, control, higher_is_better):
    arms = {SEARCH: winner, CONTROL: control}
    trials = [Trial(f"s-{arm}", arm, 0, {}, "finished") for arm in arms]
    values = {arm: {str(seed): value for seed, value in enumerate(each)} for arm, each in arms.items()}
    return Confirmation(*trials, values, compare(values[SEARCH], values[CONTROL]), higher_is_better)


@pytest.mark.parametrize(
    ("winner", "control", "word"),
    [
        ([2.10, 2.20, 2.31], [2.15, 2.25, 2.35], "Better"),
        ([2.15, 2.25, 2.35], [2.10, 2.20, 2.31], "Worse"),
        ([2.10, 2.30, 2.31], [2.15, 2.25, 2.35], "Not better"),
    ],
)
def test_the_verdict_follows_the_interval_of_the_paired_test(winner, control, word):
    """The values are losses; as scores, of which more is better, the first two verdicts change places."""
    interval = stats.ttest_rel(winner, control).confidence_interval(0.95)
    low, high = np.array(interval).tolist()
    loss = confirmation(winner, control, higher_is_better=False)
    assert loss.verdict("loss").startswith(f"{word}: ")
    assert f"95% interval [{low:+.4f}, {high:+.4f}]" in loss.verdict("loss")
    assert loss.is_better == (high < 0)
    opposite = {"Better": "Worse", "Worse": "Better"}.get(word, word)
    score = confirmation(winner, control, higher_is_better=True)
    assert score.verdict("top1").startswith(f"{opposite}: ")
    assert score.is_better == (low > 0)


def test_one_seed_confirms_nothing():
    single = confirmation([2.0], [3.0], higher_is_better=False)
    assert not single.is_better
    assert single.verdict("loss").startswith("Not confirmed: ")
    assert "give --confirm 3 or more" in single.verdict("loss")
