"""Where images come from: folders, tables through `datasets.load_dataset`, the digits; and what is refused."""

import io

import numpy as np
import pytest
from image_support import encoded, picture, write_folder, write_parquet
from PIL import Image

from lapcli.data.images.image_set import decode
from lapcli.data.images.sources import Digits, open_held_out, open_images
from lapcli.recipe.vision import ImageSource
from lapcli.runtime.errors import DataError


def pixels(images, index):
    return np.asarray(images.image(index))


def test_folders(tmp_path):
    root = write_folder(tmp_path, {"train": {"b": 3, "a": 2}, "val": {"a": 1, "b": 1}})
    data = open_images(ImageSource(train=str(root)), 2)
    assert data.train.classes == ["a", "b"]
    assert data.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert data.validation.labels.tolist() == [0, 1]
    with Image.open(root / "train" / "b" / "1.png") as image:
        assert np.array_equal(pixels(data.train, 3), np.asarray(image))
    assert data.train.name(3) == str(root / "train" / "b" / "1.png")


@pytest.mark.parametrize(
    ("parts", "classes", "message"),
    [
        ({"train": {"a": 1, "b": 0}, "val": {"a": 1, "b": 1}}, 2, r"train/b has no images"),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}}, 3, r"model\.classes"),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "c": 1}}, 2, r"different classes: b, c are in only one of them"),
        ({"train": {"a": 1, "b": 1}}, 2, r"data\.validation"),
        ({}, 2, r"no image folders"),
    ],
)
def test_folders_that_are_refused(tmp_path, parts, classes, message):
    root = write_folder(tmp_path, parts)
    with pytest.raises(DataError, match=message):
        open_images(ImageSource(train=str(root)), classes)


def test_an_undecodable_image_is_named(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 1, "b": 1}})
    broken = root / "train" / "a" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    images = open_images(ImageSource(train=str(root)), 2).train
    with pytest.raises(DataError, match=r"train/a/1\.png cannot be decoded"):
        images.image(1)


def table(labels):
    return {"img": [{"bytes": encoded(picture(i)), "path": None} for i in range(len(labels))], "label": labels}


def test_parquet_files_without_metadata(tmp_path):
    write_parquet(tmp_path / "train-00000-of-00001.parquet", table([0, 2, 1, 2]))
    write_parquet(tmp_path / "test-00000-of-00001.parquet", table([2, 0]))
    data = open_images(ImageSource(train=str(tmp_path)), 3)
    assert data.train.labels.tolist() == [0, 2, 1, 2]
    assert np.array_equal(pixels(data.train, 2), np.asarray(picture(2)))
    assert data.validation.name(1).endswith("split test, row 1")


@pytest.mark.parametrize(
    ("keys", "labels", "message"),
    [
        ({}, [0, -1, 2], r"label has labels that are no numbers"),
        ({"label_column": "label"}, ["cat", "dog", "cat"], r"label has labels that are no numbers"),
        ({"label_column": "fine"}, [0, 1, 2], r"it has img, label \(data.label_column\)"),
    ],
)
def test_tables_that_are_refused(tmp_path, keys, labels, message):
    write_parquet(tmp_path / "train.parquet", table(labels))
    write_parquet(tmp_path / "test.parquet", table([0, 1, 2]))
    with pytest.raises(DataError, match=message):
        open_images(ImageSource(train=str(tmp_path), **keys), 3)


def test_a_missing_hub_data_set_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"could not be loaded .* run `lap fetch RECIPE`"):
        open_images(ImageSource(train="hub:nobody/nothing"), 10)


def test_decoding_gives_rgb():
    for content in (
        b"DDS |" + bytes(123),
        b"\x89PNG\r\n\x1a\n",
        encoded(Image.fromarray(np.float32([[0, 0.5]])), "TIFF"),
        encoded(Image.fromarray(np.array([[0, 40_000]], dtype=np.uint16)), "PNG"),
    ):
        with pytest.raises(DataError, match="odd cannot be decoded"):
            decode(content, "odd")
    grey = decode(encoded(picture(0, mode="L")), "grey")
    assert grey.mode == "RGB"
    assert np.array_equal(np.asarray(grey)[..., 0], np.asarray(picture(0, mode="L")))
    assert decode(encoded(picture(0, mode="P"), "GIF"), "palette").mode == "RGB"
    assert decode(encoded(picture(0).convert("CMYK"), "TIFF"), "cmyk").mode == "RGB"


def test_the_digits_hold_out_a_fifth_of_each_class():
    data = open_images(ImageSource(train="builtin", validation=0.2), 10)
    assert len(data.train) + len(data.validation) == 1797
    assert len(data.validation) == pytest.approx(1797 / 5, abs=5)
    for label in range(10):
        share = (data.validation.labels == label).sum() / (Digits().labels == label).sum()
        assert share == pytest.approx(0.2, abs=0.01)
    again = open_images(ImageSource(train="builtin", validation=0.2), 10)
    assert data.identity == again.identity
    seen = {pixels(data.train, i).tobytes() for i in range(len(data.train))}
    held_out = [pixels(data.validation, i).tobytes() for i in range(len(data.validation))]
    assert sum(image in seen for image in held_out) <= 3  # the set itself has a few equal pictures


def test_every_class_has_training_images(tmp_path):
    root = write_folder(tmp_path, {"all": {"a": 18, "b": 1, "c": 2}}) / "all"
    data = open_images(ImageSource(train=str(root), validation=0.95), 3)
    counts = np.bincount(data.train.labels, minlength=3)
    assert counts.min() >= 1
    assert np.bincount(data.validation.labels, minlength=3).tolist() == (np.array([18, 1, 2]) - counts).tolist()
    assert (data.validation.labels == 0).any()
    assert (data.validation.labels == 2).sum() == 1


def test_unused_validation_images_are_noted(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 4, "b": 4}, "val": {"a": 3, "b": 3}})
    fraction = ImageSource(train=str(root), validation=0.5)
    data = open_images(fraction, 2)
    assert "6 validation images" in data.note
    assert "data.validation=null" in data.note
    # An evaluation of the run uses the images held out in training.
    assert open_held_out(fraction, ["a", "b"])[0].identity() == data.validation.identity()
    assert open_images(ImageSource(train=str(root)), 2).note is None


def test_cifar10_in_the_hub_format(test_data):
    data = open_images(ImageSource(train=str(test_data / "cifar10")), 10)
    assert (len(data.train), len(data.validation)) == (10_000, 2_000)
    assert data.train.classes[:3] == ["airplane", "automobile", "bird"]
    assert np.bincount(data.train.labels).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    import pyarrow.parquet as pq

    rows = pq.read_table(test_data / "cifar10" / "train-00000-of-00001.parquet").slice(1234, 1).to_pylist()
    with Image.open(io.BytesIO(rows[0]["img"]["bytes"])) as image:
        assert np.array_equal(pixels(data.train, 1234), np.asarray(image))
    assert data.train.labels[1234] == rows[0]["label"]


@pytest.mark.parametrize(
    ("train", "validation", "unused"),
    [
        (".", None, ["test"]),
        (".", "test", ["val"]),
        (".", 0.5, ["val"]),
        ("train", 0.5, ["val", "test"]),
        ("train", "val", ["test"]),
    ],
)
def test_ignored_folders_of_held_out_images_are_named(tmp_path, train, validation, unused):
    write_folder(tmp_path, {part: {"cat": 4, "dog": 4} for part in ("train", "val", "test")})
    named = str(tmp_path / validation) if isinstance(validation, str) else validation
    data = open_images(ImageSource(train=str(tmp_path / train), validation=named), 2)
    assert data.note is not None
    assert all(name in data.note for name in (unused if len(unused) > 1 else [str(tmp_path)]))
    (tmp_path / "only").mkdir()
    write_folder(tmp_path / "only", {"train": {"cat": 4, "dog": 4}, "val": {"cat": 2, "dog": 2}})
    assert open_images(ImageSource(train=str(tmp_path / "only")), 2).note is None
