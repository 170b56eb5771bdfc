"""Data sources of an installed package: a recipe names them, and they are read, checked and identified like files."""

import json
import os
import sys

import pytest
from support import run_process

PLUGIN = """
import io, os
import numpy as np
from PIL import Image
from lapcli.data.sources import ConversationSource, DocumentSource, LabelledImageSource

class Fables(DocumentSource):
    name = "fables"
    def fingerprint(self):
        return os.environ.get("EDITION", "first")
    def rows(self):
        for number in range(60):
            yield f"Fable {number} of the {self.fingerprint()} edition: a fox met a crow and kept the cheese."

class Riddles(ConversationSource):
    name = "riddles"
    def fingerprint(self):
        return "1"
    def rows(self):
        for number in range(5):
            question, answer = f"Riddle {number}?", f"It is {number}."
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

class Stripes(LabelledImageSource):
    name = "stripes"
    train_images = 24
    def images(self):
        from lapcli.data.images.image_set import ImageSet
        class Drawn(ImageSet):
            def __init__(self, count, seed):
                super().__init__(np.arange(count) % 2, ["across", "down"])
                self._pngs = [self._png(label, np.random.default_rng([seed, n])) for n, label in enumerate(self.labels)]
            def _png(self, label, draw):
                grey = np.repeat(draw.integers(0, 256, (8, 1), dtype=np.uint8), 8, axis=1)
                kept = io.BytesIO()
                Image.fromarray(grey.T if label else grey).save(kept, "PNG")
                return kept.getvalue()
            def encoded(self, index):
                return self._pngs[index]
            def name(self, index):
                return f"stripe {index}"
        return Drawn(24, 0), Drawn(8, 1)

def register(extensions):
    for source in (Fables(), Riddles(), Stripes()):
        extensions.add("data source", source)
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with the package as pip would leave it: a module, and metadata with one entry point."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "shelf.py").write_text(PLUGIN)
    metadata = folder / "shelf-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 3.1\n")
    (metadata / "entry_points.txt").write_text("[lap.plugins]\nshelf = shelf\n")
    return folder


def run(shelf, *arguments, **environment):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(shelf), *sys.path]), **environment}
    return run_process([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_images_and_conversations_of_a_package(shelf):
    code = (
        "from lapcli.data.images.sources import open_images\n"
        "from lapcli.data.sources import known_images\n"
        "from lapcli.recipe.vision import ImageSource\n"
        "data = open_images(ImageSource(train='plugin:stripes'), 2)\n"
        "again = open_images(ImageSource(train='plugin:stripes'), 2)\n"
        "assert data.identity == again.identity\n"
        "assert data.train.classes == ['across', 'down']\n"
        "assert (len(data.train), len(data.validation)) == (24, 8)\n"
        "assert known_images('plugin:stripes') == 24\n"
        "from lapcli.data.chat.mixture import prepare_mixture\n"
        "from lapcli.data.text.tokenizer import train_tokenizer\n"
        "from lapcli.recipe.chat import DataSet\n"
        "tokenizer = train_tokenizer(['a'], 265, max_chars=10, crop=10)\n"
        "riddles = DataSet(name='r', format='conversations', source='plugin:riddles')\n"
        "options = dict(seed=0, longest=99, needs_targets=True, skip_malformed=False)\n"
        "mixture = prepare_mixture([riddles], tokenizer, **options)\n"
        "import json; print(json.dumps(sorted(tokenizer.decode(mixture.row(n)[0]) for n in range(len(mixture)))))\n"
    )
    result = run(shelf, "-c", code)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [
        f"<|bos|><|user_start|>Riddle {n}?<|user_end|><|assistant_start|>It is {n}.<|assistant_end|>" for n in range(5)
    ]
