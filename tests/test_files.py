import pytest

from lapcli.files import write_text


def test_writing_a_file_is_all_or_nothing(tmp_path):
    write_text(tmp_path / "a.json", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.json", "\ud800")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
