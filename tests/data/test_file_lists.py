import pytest

from lapcli.data.file_lists import check_file_list, expand_ranges, local_files
from lapcli.runtime.errors import DataError


def test_a_range_is_a_fixed_list_in_order():
    names = expand_ranges("shard_{00000..00239}.parquet")
    assert names == [f"shard_{i:05d}.parquet" for i in range(240)]
    assert expand_ranges("{8..11}.txt") == ["8.txt", "9.txt", "10.txt", "11.txt"]
    assert expand_ranges(["b.txt", "a{1..2}{0..1}.txt"]) == ["b.txt", "a10.txt", "a11.txt", "a20.txt", "a21.txt"]
    assert expand_ranges("no{range}.txt") == ["no{range}.txt"]


@pytest.mark.parametrize("pattern", ["a{5..4}.txt", "a{0..999999999999}.txt"])
def test_an_impossible_range_is_refused(pattern):
    with pytest.raises(DataError, match="expected 1 to 1,000,000"):
        expand_ranges(pattern)


@pytest.fixture
def folder(tmp_path):
    for name in ("b.txt", "a.jsonl", "c.parquet", "d.txt.gz", "notes.md", "deep/e.txt", "deep/f_1.txt", "x[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def found(folder, files=None):
    return [path.relative_to(folder).as_posix() for path in local_files(str(folder), files)]


def test_a_folder_is_read_by_name(folder):
    assert found(folder) == ["a.jsonl", "b.txt", "c.parquet", "d.txt.gz", "x[1].txt"]


def test_files_are_read_in_the_order_given(folder):
    assert found(folder, ["c.parquet", "**/*.txt"]) == ["c.parquet", "b.txt", "deep/e.txt", "deep/f_1.txt", "x[1].txt"]
    assert found(folder, "deep/f_{1..1}.txt") == ["deep/f_1.txt"]
    assert found(folder, "x[1].txt") == ["x[1].txt"], "a name that looks like a pattern is a name"


def test_a_file_is_itself(folder):
    assert local_files(str(folder / "b.txt"), None) == [folder / "b.txt"]
    with pytest.raises(DataError, match="single file"):
        local_files(str(folder / "b.txt"), "b.txt")


@pytest.mark.parametrize(("where", "files"), [("nowhere", None), ("deep", "*.parquet"), ("empty", None)])
def test_nothing_there_is_an_error_that_says_where(folder, where, files):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=where):
        local_files(str(folder / where), files)


def test_twice_the_same_file_and_unknown_kinds_are_refused():
    with pytest.raises(DataError, match=r"b.txt is named twice"):
        check_file_list(["a.txt", "b.txt", "b.txt"])
    with pytest.raises(DataError, match=r"notes.csv is of no kind"):
        check_file_list(["notes.csv"])
