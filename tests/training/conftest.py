"""A tiny recipe for each kind of training."""

import pytest
from analysis_support import self_supervised_recipe
from image_support import image_recipe
from support import staged, tiny_chat_recipe, tiny_recipe, train_here, write_text


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="session")
def base(text, tmp_path_factory, shared_cache):
    """A pretrained run for chat stages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        return train_here(tiny_recipe(text, train={"steps": 1}), tmp_path_factory.mktemp("base"), "base")


@pytest.fixture(scope="session")
def kinds(text, base, tmp_path_factory):
    """Kind -> a function that returns its recipe with some keys replaced."""
    folder = tmp_path_factory.mktemp("chats")

    def chat(**changes):
        return staged(tiny_chat_recipe(folder, sft=changes), "sft", base)

    return {
        "language_model": lambda **changes: tiny_recipe(text, **changes),
        "chat": chat,
        "classification": lambda **changes: image_recipe(**changes),
        "self_supervised": lambda **changes: self_supervised_recipe(**changes),
    }
