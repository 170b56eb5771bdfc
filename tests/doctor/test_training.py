"""The doctor's small training runs, in real processes: each check passes here, and fails when it should."""

import json

import pytest
from support import run_main

from lapcli.doctor.training import check_ranks, check_resume


@pytest.mark.long
def test_a_killed_run_resumes(tmp_path):
    assert check_resume(tmp_path, "cpu").status == "passes"


@pytest.mark.long
def test_ranks_agree(tmp_path):
    assert check_ranks(tmp_path, 2, "cpu").status == "passes"


def test_the_command(capsys):
    code, out, err = run_main(capsys, "doctor", "--only", "environment", "--json")
    found = json.loads(out)
    assert (code, found["fails"]) == (0, 0), err
    assert {check["section"] for check in found["checks"]} == {"environment"}
    assert all(check["name"] in err for check in found["checks"])
    assert run_main(capsys, "doctor", "--only", "processes", "--nproc", "1")[0] == 2
