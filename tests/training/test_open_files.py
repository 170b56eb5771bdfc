"""A run that has ended, in whatever way, has closed its files and pipes, and ended its workers."""

import gc
import multiprocessing
import os
import sys

import pytest
from image_support import image_recipe
from support import tiny_recipe, train_here, wait_until, write_text

from lapcli.training.optimizers import Optimizers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def open_files():
    """By name; without torch's shared memory, of which the last batch stays until a collection."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # the one that lists the folder
            continue
    return sorted(name for name in names if not name.startswith("/dev/shm/"))


def wait_until_closed(before, prefix=""):
    """A queue's own thread closes its pipe a moment after the queue was closed."""

    def still_open():
        return sorted(name for name in set(open_files()) - set(before) if name.startswith(prefix))

    wait_until(lambda: not still_open(), told=still_open)


@pytest.fixture
def no_collection():
    """Python's collector would close what a reference cycle holds, at some moment that nobody knows."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_finished_run_of_text(tmp_path, no_collection):
    recipe = tiny_recipe(write_text(tmp_path / "text.txt"), train={"steps": 2})
    train_here(recipe, tmp_path, "first")  # imports open files that stay
    gc.collect()
    before = open_files()
    train_here(recipe, tmp_path, "second")
    wait_until_closed(before)


def test_a_run_of_images_that_finishes_and_one_that_fails(tmp_path, no_collection, monkeypatch):
    recipe = image_recipe(data={"workers": 1}, train={"steps": 2})
    train_here(recipe, tmp_path, "first")
    gc.collect()
    before = open_files()
    train_here(recipe, tmp_path, "second")
    wait_until_closed(before)

    def fail(self):
        raise RuntimeError("in the middle of a step")

    monkeypatch.setattr(Optimizers, "step", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        train_here(recipe, tmp_path, "third")
    assert multiprocessing.active_children() == []
    wait_until_closed(before, "pipe:")
