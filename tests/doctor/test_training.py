"""The small trainings of the doctor, in real processes: each check passes here, and is seen to fail."""

import json

import pytest
from support import lap

from lapcli.doctor.training import check_raise, check_ranks, check_resume


@pytest.mark.long
def test_a_killed_run_resumes(tmp_path):
    assert check_resume(tmp_path, "cpu").status == "passes"


@pytest.mark.long
def test_ranks_are_equal_and_one_that_raises_ends_all(tmp_path):
    assert check_ranks(tmp_path, 2, "cpu").status == "passes"
    assert check_raise(tmp_path, 2, "cpu").status == "passes"


def test_the_command(shared_cache):
    result = lap("doctor", "--only", "environment", "--json", cache=shared_cache)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["fails"] == 0
    assert {check["section"] for check in found["checks"]} == {"environment"}
    assert all(check["name"] in result.stderr for check in found["checks"])
    assert lap("doctor", "--only", "processes", "--nproc", "1", cache=shared_cache).returncode == 2
