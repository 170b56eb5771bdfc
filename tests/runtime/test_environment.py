"""The resources of a machine, and one sentence if they are insufficient."""

import os

import pytest

from lapcli.runtime.environment import check_compiler, container_cores, usable_cores
from lapcli.runtime.errors import UsageError


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("250000 100000", 2), ("50000 100000", 1)])
def test_the_cpu_quota_of_a_container(tmp_path, quota, cores):
    (tmp_path / "cpu.max").write_text(quota + "\n")  # of docker run --cpus 2.5, say
    assert container_cores(tmp_path / "cpu.max") == cores
    assert container_cores(tmp_path / "nowhere") is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_cores_come_from_the_affinity_mask():
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        os._exit(usable_cores())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


@pytest.mark.parametrize(("device", "variable"), [("cuda", "CC"), ("cpu", "CXX")])
def test_without_a_compiler_one_sentence_names_the_key(device, variable, monkeypatch):
    check_compiler(device)  # here is one
    monkeypatch.setenv(variable, "no-such-compiler -O2")
    with pytest.raises(UsageError, match=r"no-such-compiler.*train\.compile=false"):
        check_compiler(device)
