"""Data sources of an installed package: a recipe names them, and they are read, checked and identified like files."""

import json
import os
import sys

import pytest
import yaml
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
LANGUAGE_MODEL = {
    "objective": "language_model",
    "model": {"layers": 1, "width": 16, "heads": 2, "context": 16, "laplacian_heads": 1},
    "tokenizer": {"vocab": 280},
    "data": {"train": "plugin:fables"},
    "train": {"steps": 2, "batch": 2, "micro_batch": 2},
    "optimizer": {"lr": 0.01},
    "checkpoint": {"every": 1},
}


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


def written(path, recipe):
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_a_source_whose_content_changed_is_other_data(shelf, tmp_path):
    """The same text in a file has the same identity; another edition has another."""
    code = (
        "import sys; from lapcli.data.text.tokens import prepare_text\n"
        "from lapcli.recipe.schema import TextSource, TokenizerSection\n"
        "data = prepare_text(TextSource(train=sys.argv[1]), TokenizerSection(vocab=280))\n"
        "print(data.identity)\n"
    )
    lines = [f"Fable {n} of the first edition: a fox met a crow and kept the cheese." for n in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    first, second, local = (
        run(shelf, "-c", code, source, EDITION=edition).stdout
        for source, edition in (
            ("plugin:fables", "first"),
            ("plugin:fables", "second"),
            (str(tmp_path / "text.jsonl"), "none"),
        )
    )
    assert first == local != second
    assert second


def test_images_and_conversations_of_a_package(shelf):
    code = (
        "from lapcli.data.images.sources import open_images\n"
        "from lapcli.data.sources import known_set\n"
        "from lapcli.recipe.vision import ImageSource\n"
        "data = open_images(ImageSource(train='plugin:stripes'), 2)\n"
        "again = open_images(ImageSource(train='plugin:stripes'), 2)\n"
        "assert data.identity == again.identity\n"
        "assert data.train.classes == ['across', 'down']\n"
        "assert (len(data.train), len(data.validation)) == (24, 8)\n"
        "assert known_set('plugin:stripes').train_images == 24\n"
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


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("plugin:fabels", r"data.train: there is no data source 'fabels'; did you mean fables?"),
        ("plugin:stripes", r"data.train: the data source stripes gives images, not text"),
    ],
)
def test_a_source_that_is_not_usable_is_refused_with_its_place(shelf, tmp_path, source, said):
    recipe = written(tmp_path / "r.yaml", {**LANGUAGE_MODEL, "data": {"train": source}})
    result = run(shelf, "-m", "lapcli", "train", recipe, "--runs-dir", str(tmp_path / "runs"))
    assert result.returncode == 2
    assert said in " ".join(result.stderr.split()), result.stderr
    assert not (tmp_path / "runs").exists()
