"""Run directories that hold the paper's own numbers."""

import pytest
from report_support import write_paper

from lapcli.report.collect import collect


@pytest.fixture(scope="session")
def collected(tmp_path_factory):
    runs = tmp_path_factory.mktemp("paper")
    write_paper(runs)
    return collect([], runs).runs
