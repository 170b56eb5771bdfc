import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapcli.evaluation.benchmarks import pass_at
from lapcli.evaluation.benchmarks.humaneval import answered_program
from lapcli.evaluation.benchmarks.numbers import final_number


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_fraction_of_draws_with_a_correct_sample(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    draws = list(combinations(passed, k))
    assert pass_at(k, passed) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 5.\n#### 1,234", "1234"),
        ("#### -7 and #### 8", "-7"),  # the first one counts
        ("#### 42.", "42."),  # which is not the reference's 42
        ("####42", None),
        ("#### $42", None),
    ],
)
def test_the_number_after_the_marks(text, number):
    """As nanochat reads it: a space after the marks, then digits, points and commas."""
    assert final_number(text) == number


PROMPT = "import math\nfrom typing import List\n\n\ndef area(r):\n    import os\n    '''Area.'''\n"
AREA = "def area(r):\n    return math.pi * r * r\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"Here it is:\n```python\n{AREA}```\nand\n```\nno\n```",
        f"```\n{AREA}```",
        f"It's as follows: ```python\n{AREA}```",
    ],
)
def test_a_program_is_the_first_block_plus_the_prompt_imports(answer):
    program = answered_program({"prompt": PROMPT}, answer)
    assert program.startswith("import math\nfrom typing import List\n")
    assert "os" not in program
    found: dict = {}
    exec(program, found)
    assert found["area"](2) == pytest.approx(4 * math.pi)


@pytest.mark.parametrize(
    "answer",
    [
        "I cannot do it.",
        "```python\ndef area(r):\n    return 0\n```\n```python\ndef area(r):\n    return math.pi * r * r\n```",
        "    return math.pi * r * r\n",
        # nanochat does not detect these blocks and runs the complete answer.
        f"```Python\n{AREA}```",
        f"```bash\npip install nothing\n```\nand\n```python\n{AREA}```",
    ],
)
def test_invalid_programs_stay_invalid(answer):
    """The first block counts, and a body without its signature is not a program."""
    found: dict = {}
    try:
        exec(answered_program({"prompt": PROMPT}, answer), found)
    except SyntaxError:
        return
    assert "area" not in found or found["area"](2) == 0
