import math

import pytest

from lapcli.measures.bits_per_byte import bits_per_byte
from lapcli.runtime.errors import DataError


def test_a_text_without_bytes_has_no_bits_per_byte() -> None:
    with pytest.raises(DataError, match="the held-out text"):
        bits_per_byte(0.0, 0, "the held-out text")
    assert bits_per_byte(math.log(2), 2, "two bytes") == pytest.approx(0.5)
