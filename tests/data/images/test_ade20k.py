"""ADE20K: the official layout and the hub's columns give the same scenes; what is no label map is named."""

import numpy as np
import pytest
from image_support import encoded, picture, write_parquet
from PIL import Image
from scene_support import scene, write_scenes

from lapcli.data.images.ade20k import IGNORED, check_scenes, is_ade20k, open_ade20k
from lapcli.runtime.errors import DataError


def test_labels_move_down_by_one_and_nothing_becomes_255(tmp_path):
    data = open_ade20k(str(write_scenes(tmp_path / "ade")))
    assert (len(data.train), len(data.validation)) == (8, 3)
    for index in range(3):
        image, labels = data.validation.scene(index)
        expected_image, raw = scene(1000 + index)
        assert (np.asarray(image) == np.asarray(expected_image)).all()
        assert (labels[raw == 0] == IGNORED).all()
        assert (labels[raw > 0] == raw[raw > 0] - 1).all()
        assert {149, IGNORED} <= set(np.unique(labels))


def test_the_archives_own_folder_and_parquet_files_are_the_same(tmp_path):
    write_scenes(tmp_path / "a" / "ADEChallengeData2016")
    assert is_ade20k(tmp_path / "a")
    folder = open_ade20k(str(tmp_path / "a"))
    for split, count, first in (("train", 8, 0), ("validation", 3, 1000)):
        scenes = [scene(first + number) for number in range(count)]
        columns = {
            "image": [{"bytes": encoded(image), "path": None} for image, _ in scenes],
            "annotation": [{"bytes": encoded(Image.fromarray(labels)), "path": None} for _, labels in scenes],
        }
        write_parquet(tmp_path / "b" / f"{split}-00000-of-00001.parquet", columns)
    assert not is_ade20k(tmp_path / "b")
    tables = open_ade20k(str(tmp_path / "b"))
    assert len(tables.train) == 8
    for index in range(3):
        for one, other in zip(folder.validation.scene(index), tables.validation.scene(index), strict=True):
            assert (np.asarray(one) == np.asarray(other)).all()
    with pytest.raises(DataError, match="no column label; it has image, annotation"):
        open_ade20k(str(tmp_path / "b"), label_column="label")


def too_high(labels):
    labels[3, 5] = 151
    return Image.fromarray(labels)


def negative(labels):
    labels = labels.astype(np.int32)
    labels[3, 5] = -1
    return Image.fromarray(labels)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda labels: Image.fromarray(labels).convert("RGB"), "is no label map: its mode is RGB"),
        (lambda labels: Image.fromarray(labels[:, :-1]), "it has 23 x 16 pixels, the photograph 24 x 16"),
        (too_high, "it has the label 151, expected 0 to 150"),
        (negative, "it has the label -1, expected 0 to 150"),
    ],
)
def test_what_is_no_label_map_is_named(tmp_path, spoil, message):
    root = write_scenes(tmp_path / "ade")
    bad = root / "annotations" / "training" / "0004.png"
    labels = spoil(np.array(Image.open(bad)))
    labels.save(bad, "TIFF" if labels.mode == "I" else "PNG")  # PNG has no negative numbers
    with pytest.raises(DataError, match=message) as error:
        check_scenes(open_ade20k(str(root)))
    assert str(bad) in str(error.value)


def test_other_damage_is_named_too(tmp_path):
    root = write_scenes(tmp_path / "ade")
    bad = root / "annotations" / "validation" / "0001.png"
    bad.write_bytes(b"not a picture")
    with pytest.raises(DataError, match=r"0001\.png cannot be decoded as a label map"):
        check_scenes(open_ade20k(str(root)))
    bad.unlink()
    with pytest.raises(DataError, match=r"0001\.png is missing"):
        open_ade20k(str(root))
    (tmp_path / "images" / "cat").mkdir(parents=True)
    picture(0).save(tmp_path / "images" / "cat" / "0.png")
    with pytest.raises(DataError, match="expected images/training, annotations/training"):
        open_ade20k(str(tmp_path / "images"))


def test_without_a_network_the_next_step_is_named():
    with pytest.raises(DataError, match=r"HF_HUB_OFFLINE is set.*ade20k\.data=DIR"):
        open_ade20k("hub:zhoubolei/scene_parse_150")


def test_the_real_subset(test_data):
    data = open_ade20k(str(test_data / "ade20k_subset"))
    assert (len(data.train), len(data.validation)) == (90, 25)
    image, labels = data.validation.scene(0)
    assert labels.shape == (image.height, image.width)
    seen = set()
    for index in range(0, 25, 5):
        seen |= set(np.unique(data.validation.scene(index)[1]))
    assert seen - {IGNORED} <= set(range(150))
    assert {0, 2} <= seen  # wall and sky
