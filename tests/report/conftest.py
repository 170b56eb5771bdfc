"""Run directories with the paper's own numbers."""

import pytest
from report_support import write_paper

from lapcli.report.collect import collect, grids_of


@pytest.fixture(scope="session")
def paper_grids(tmp_path_factory):
    runs = tmp_path_factory.mktemp("paper")
    write_paper(runs)
    return grids_of(collect([], runs))
