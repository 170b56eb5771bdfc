import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.evaluation.harness.answers import final_number, pass_at, python_program


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    draws = list(combinations(passed, k))
    assert pass_at(k, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_the_edges():
    assert pass_at(1, [True] * 3 + [False] * 7) == pytest.approx(0.3)
    assert pass_at(10, [True] + [False] * 9) == 1.0
    assert pass_at(10, [False] * 10) == 0.0
    with pytest.raises(ValueError, match="at least 11"):
        pass_at(11, [True] * 10)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 5.\n#### 1,234", "1234"),
        ("#### -7 and #### 8", "-7"),  # the first one counts
        ("#### 10.", "10."),  # as upstream: not the same as 10
        ("####5", None),
        ("#### $5", None),
        ("ten", None),
    ],
)
def test_the_number_after_the_marks(text, number):
    assert final_number(text) == number


PROMPT = "import math\nfrom typing import List\n\n\ndef area(r):\n    import os\n    '''Area.'''\n"


@pytest.mark.parametrize(
    "answer",
    [
        "Here it is:\n```python\ndef area(r):\n    return math.pi * r * r\n```\nand\n```\nno\n```",
        "```\ndef area(r):\n    return math.pi * r * r\n```",
        "\ndef area(r):\n    return math.pi * r * r\n",
    ],
)
def test_a_program_is_the_first_block_with_the_imports_of_the_prompt(answer):
    program = python_program(PROMPT, answer)
    assert program.startswith("import math\nfrom typing import List\n")
    assert "os" not in program
    found: dict = {}
    exec(program, found)
    assert found["area"](2) == pytest.approx(4 * math.pi)
