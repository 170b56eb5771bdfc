"""Where images come from: folders, tables through `datasets.load_dataset`, the digits; and what is refused."""

import io
import os
import pickle
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from image_support import encoded, picture, write_folder, write_parquet
from PIL import Image

from lapcli.data.images.image_set import FolderImages, ImagesInMemory, ImageSubset, decode
from lapcli.data.images.sources import Digits, open_held_out, open_images
from lapcli.recipe.vision import ImageSource
from lapcli.runtime.errors import DataError


def pixels(images, index):
    return np.asarray(images.image(index))


def test_nowhere(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        open_images(ImageSource(train=str(tmp_path / "nowhere")), 2)


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
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 0}}, 2, r"val/b has no images"),
        (
            {"train": {"a": 1, "b": 1}, "val": {"a": 1, "b": 1}},
            3,
            r"images of .* have 2 classes, but model.classes",
        ),
        ({"train": {"a": 1, "b": 1}, "val": {"a": 1, "c": 1}}, 2, r"different classes: b, c are in only one of them"),
        ({"train": {"a": 1, "b": 1}}, 2, r"data\.validation"),
        ({}, 2, r"no folders of images"),
    ],
)
def test_folders_that_are_refused(tmp_path, parts, classes, message):
    root = write_folder(tmp_path, parts)
    with pytest.raises(DataError, match=message):
        open_images(ImageSource(train=str(root)), classes)


def test_an_undecodable_image_is_named_before_training(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 3, "b": 3}, "val": {"a": 1, "b": 1}})
    broken = root / "train" / "a" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(DataError, match=r"train/a/1\.png cannot be decoded"):
        open_images(ImageSource(train=str(root)), 2)
    held_back = ImageSource(train=str(root), decoded_gigabytes=0.0)
    with pytest.raises(DataError, match=r"train/a/1\.png cannot be decoded"):
        open_images(held_back, 2).train.image(1)


def table(labels, last=None, **names):
    cells = [{"bytes": encoded(picture(i)), "path": None} for i in range(len(labels))]
    cells[-1]["bytes"] = last or cells[-1]["bytes"]
    return {names.get("image", "img"): cells, names.get("label", "label"): labels}


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
        ({}, [0, -1, 2], r"row 1 has the label -1"),
        ({}, [0, 10**9, 2], r"row 1 has the label 1000000000"),
        ({}, [0, 1, 2], r"row 2 cannot be decoded"),
        ({"label_column": "label"}, ["cat", "dog", "cat"], r"row 0 has the label 'cat'"),
        ({"label_column": "fine"}, [0, 1, 2], r"no column fine; it has img, label \(data.label_column\)"),
        ({"image_column": "photo"}, [0, 1, 2], r"no column photo; it has img, label \(data.image_column\)"),
    ],
)
def test_tables_that_are_refused(tmp_path, keys, labels, message):
    write_parquet(tmp_path / "train.parquet", table(labels, b"no image" if "row 2" in message else None))
    write_parquet(tmp_path / "test.parquet", table([0, 1, 2]))
    with pytest.raises(DataError, match=message):
        open_images(ImageSource(train=str(tmp_path), **keys), 3)


def test_a_label_column_must_be_named_where_there_are_two(tmp_path):
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", {**table([0, 1, 2]), "coarse": [0, 0, 1]})
    with pytest.raises(DataError, match=r"2 columns that hold labels; it has img, label, coarse"):
        open_images(ImageSource(train=str(tmp_path)), 3)
    assert len(open_images(ImageSource(train=str(tmp_path), label_column="label"), 3).train) == 3


def test_a_hub_set_that_is_not_here_names_the_way(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"could not be loaded .* run `lap fetch RECIPE`"):
        open_images(ImageSource(train="hub:nobody/nothing"), 10)


def test_decoding_gives_rgb():
    for content in (
        b"DDS |" + bytes(123),
        b"\x89PNG\r\n\x1a\n",
        encoded(Image.fromarray(np.float32([[0, 0.5]])), "TIFF"),
    ):
        with pytest.raises(DataError, match="odd cannot be decoded"):
            decode(content, "odd")
    grey = decode(encoded(picture(0, mode="L")), "grey")
    assert grey.mode == "RGB"
    assert np.array_equal(np.asarray(grey)[..., 0], np.asarray(picture(0, mode="L")))
    eight = np.asarray(picture(0, mode="L"))
    for form, dtype in (("PNG", np.uint16), ("TIFF", np.uint16), ("TIFF", np.int32)):  # more bits keep their shades
        sixteen = Image.fromarray((eight.astype(np.int64) * 257).astype(dtype))
        assert np.array_equal(np.asarray(decode(encoded(sixteen, form), "deep"))[..., 1], eight)
    assert decode(encoded(picture(0, mode="P"), "GIF"), "palette").mode == "RGB"
    assert decode(encoded(picture(0).convert("CMYK"), "TIFF"), "cmyk").mode == "RGB"


def test_an_orientation_is_ignored_as_by_the_reference_loaders_or_applied(tmp_path):
    from torchvision.datasets import ImageFolder

    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    stored = picture(0, (12, 10))
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            (tmp_path / part / name / "0.png").write_bytes(encoded(stored, exif=exif))
    cells = [{"bytes": encoded(stored, exif=exif), "path": None}] * 2
    for part in ("train", "test"):
        write_parquet(tmp_path / "tables" / f"{part}.parquet", {"img": cells, "label": [0, 1]})
    reference, _ = ImageFolder(str(tmp_path / "train"))[0]
    turned = np.rot90(np.asarray(stored), k=-1)
    for where in (tmp_path, tmp_path / "tables"):
        for gigabytes in (0.0, 1.0):
            for key, expected in (("ignore", np.asarray(reference)), ("apply", turned)):
                source = ImageSource(train=str(where), exif_orientation=key, decoded_gigabytes=gigabytes)
                data = open_images(source, 2)
                assert np.array_equal(pixels(data.train, 0), expected)
                assert np.array_equal(pixels(data.validation, 1), expected)
                assert np.array_equal(pixels(open_held_out(source, data.train.classes)[0], 1), expected)
    assert ImageSource(train=str(tmp_path)).exif_orientation == "ignore"
    assert np.array_equal(np.asarray(reference), np.asarray(stored))


def test_the_processes_of_a_launch_share_one_copy_of_decoded_images(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    for number in range(40):
        picture(number, (100, 90)).save(tmp_path / "a" / f"{number:02}.png")
    images, total = FolderImages(tmp_path), 40 * 3 * 100 * 90
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("LAP_LAUNCHER", str(os.getppid()))
    ended = tmp_path / "temporary" / f"lap-images-{os.getuid()}" / "4194305"  # beyond the largest process id
    ended.mkdir(parents=True)
    tracemalloc.start()
    held = ImagesInMemory(images)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < total / 3
    assert not ended.exists()
    with monkeypatch.context() as second:  # another rank decodes nothing
        second.setattr(FolderImages, "image", None)
        again = pickle.loads(pickle.dumps(ImagesInMemory(images)))
    assert all(np.array_equal(pixels(each, n), pixels(images, n)) for each in (held, again) for n in range(40))
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    assert not maps or len({line.split()[4] for line in maps.splitlines() if str(tmp_path) in line}) == 1  # inodes


def test_the_identity_is_of_content_not_of_place(tmp_path):
    a = write_folder(tmp_path / "a", {"train": {"a": 2, "b": 2}})
    b = tmp_path / "moved"
    shutil.copytree(a, b)
    assert FolderImages(a / "train").identity() == FolderImages(b / "train").identity()
    picture(77).save(b / "train" / "a" / "0.png")
    assert FolderImages(a / "train").identity() != FolderImages(b / "train").identity()
    images = FolderImages(a / "train")
    swapped = ImageSubset(images, np.array([1, 0, 2, 3]))
    assert swapped.identity() != images.identity()


def test_classes_and_images_may_be_links(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 3, "b": 3}, "store": {"c": 2}})
    (root / "train" / "c").symlink_to(root / "store" / "c")  # a class on another disk
    (root / "train" / "a" / "far.png").symlink_to(root / "store" / "c" / "nowhere.png")
    (root / "train" / "a" / ".hidden.png").touch()
    (root / "train" / "a" / "loop").symlink_to("..")
    images = FolderImages(root / "train")
    assert images.classes == ["a", "b", "c"]
    assert np.bincount(images.labels).tolist() == [4, 3, 2]
    with pytest.raises(DataError, match=r"far\.png cannot be read"):
        images.encoded(3)


def test_the_digits_hold_out_a_fifth_of_each_class():
    data = open_images(ImageSource(train="builtin", validation=0.2), 10)
    assert len(data.train) + len(data.validation) == 1797
    assert len(data.validation) == pytest.approx(1797 / 5, abs=5)
    for label in range(10):
        share = (data.validation.labels == label).sum() / (Digits().labels == label).sum()
        assert share == pytest.approx(0.2, abs=0.01)
    again = open_images(ImageSource(train="builtin", validation=0.2), 10)
    other = open_images(ImageSource(train="builtin", validation=0.2, split_seed=1), 10)
    assert data.identity == again.identity != other.identity
    seen = {pixels(data.train, i).tobytes() for i in range(len(data.train))}
    held_out = [pixels(data.validation, i).tobytes() for i in range(len(data.validation))]
    assert sum(image in seen for image in held_out) <= 3  # the set itself has a few equal pictures


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.95])
def test_every_class_is_trained_on(tmp_path, fraction):
    root = write_folder(tmp_path, {"all": {"a": 18, "b": 1, "c": 2}}) / "all"
    data = open_images(ImageSource(train=str(root), validation=fraction), 3)
    counts = np.bincount(data.train.labels, minlength=3)
    assert counts.min() >= 1
    assert np.bincount(data.validation.labels, minlength=3).tolist() == (np.array([18, 1, 2]) - counts).tolist()
    assert (data.validation.labels == 0).any()
    assert (data.validation.labels == 2).sum() == 1


def test_validation_images_that_a_fraction_leaves_unused_are_noted(tmp_path):
    root = write_folder(tmp_path, {"train": {"a": 4, "b": 4}, "val": {"a": 3, "b": 3}})
    fraction = ImageSource(train=str(root), validation=0.5)
    data = open_images(fraction, 2)
    (note,) = data.notes(64)
    assert "6 validation images" in note
    assert "data.validation=null" in note
    # An evaluation of the run measures the images that its training held out.
    assert open_held_out(fraction, ["a", "b"])[0].identity() == data.validation.identity()
    assert open_images(ImageSource(train=str(root)), 2).notes(64) == []


def test_cifar10_as_the_hub_has_it(test_data):
    data = open_images(ImageSource(train=str(test_data / "cifar10")), 10)
    assert (len(data.train), len(data.validation)) == (10_000, 2_000)
    assert data.train.classes[:3] == ["airplane", "automobile", "bird"]
    assert np.bincount(data.train.labels).tolist() == [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    assert isinstance(data.train, ImagesInMemory)
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
def test_folders_of_held_out_images_that_are_not_read_are_named(tmp_path, train, validation, unused):
    write_folder(tmp_path, {part: {"cat": 4, "dog": 4} for part in ("train", "val", "test")})
    named = str(tmp_path / validation) if isinstance(validation, str) else validation
    data = open_images(ImageSource(train=str(tmp_path / train), validation=named), 2)
    (note,) = data.notes(64)[:1]
    assert all(name in note for name in (unused if len(unused) > 1 else [str(tmp_path)]))
    (tmp_path / "only").mkdir()
    write_folder(tmp_path / "only", {"train": {"cat": 4, "dog": 4}, "val": {"cat": 2, "dog": 2}})
    assert open_images(ImageSource(train=str(tmp_path / "only")), 2).note is None
