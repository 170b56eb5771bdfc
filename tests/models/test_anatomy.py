"""Which models an analysis can look into."""

import pytest
import timm

from lapcli.models.anatomy import anatomy_of
from lapcli.runtime.errors import UsageError


def test_a_model_that_is_no_plain_stack_is_refused():
    with pytest.raises(UsageError, match="cannot be analysed"):
        anatomy_of(timm.create_model("resnet18", num_classes=2))
