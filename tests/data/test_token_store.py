import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_support import TOKENIZER, documents, flip, source, write_stories

from lapcli.data.text.tokens import prepare_text
from lapcli.data.token_store import PartWriter, TokenStore, TokenStream
from lapcli.runtime.errors import DataError


def written(folder, texts, vocab=100, **options):
    """A part with the documents `texts`, each written in two pieces, and the part number as a second column."""
    folder.mkdir()
    writer = PartWriter(folder, vocab, columns=2, **options)
    for number, ids in enumerate(texts):
        for piece in (ids[:2], ids[2:]):
            writer.append(piece, *([piece % 2 == 1] if options else []))
        writer.end(number)
    writer.close(fact=5)
    return folder


@settings(deadline=None, max_examples=100)
@given(
    parts=st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=4),
    vocab=st.sampled_from([65_536, 65_537]),
    order=st.randoms(use_true_random=False),
    read=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_documents_of_parts_in_any_order_are_one_stream(tmp_path_factory, parts, vocab, order, read):
    folder = tmp_path_factory.mktemp("store")
    draw = np.random.default_rng(0)
    texts = [[draw.integers(0, vocab, length) for length in lengths] for lengths in parts]
    store = TokenStore([written(folder / str(n), part, vocab, has_targets=True) for n, part in enumerate(texts)])
    every = [ids for part in texts for ids in part]
    assert len(store) == len(every)
    assert store.counts == [len(part) for part in texts]
    assert store.lengths.tolist() == [len(ids) for ids in every]
    assert store.numbers[:, 1].tolist() == [number for part in texts for number in range(len(part))]
    for path in folder.glob("*/tokens.bin"):
        ids = np.concatenate([*texts[int(path.parent.name)], np.empty(0)])
        assert path.read_bytes() == ids.astype("<u2" if vocab == 65_536 else "<u4").tobytes()
        sha256 = store.indexes[int(path.parent.name)]["files"]["tokens.bin"][1]
        assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    chosen = order.sample(range(len(every)), order.randint(0, len(every)))
    expected = np.concatenate([np.empty(0, int), *(every[number] for number in chosen)])
    stream = TokenStream(store, np.array(chosen, dtype=int))
    assert len(stream) == len(expected)
    first, end = sorted(round(place * len(expected)) for place in read)
    if first < end:
        assert stream.read(first, end - first).tolist() == expected[first:end].tolist()
    with pytest.raises(IndexError):
        stream.read(first, len(expected) + 1)
    for number, ids in enumerate(every):
        row, is_target = store.row(number)
        assert (row.tolist(), is_target.tolist()) == (ids.tolist(), (ids % 2 == 1).tolist())


@pytest.mark.parametrize(("name", "is_cut"), [("tokens.bin", True), ("documents.bin", False)])
def test_a_damaged_file_is_named_and_the_next_start_builds_its_part_again(tmp_path, lap_cache, name, is_cut):
    write_stories(tmp_path / "a.jsonl")
    write_stories(tmp_path / "b.jsonl")
    first = prepare_text(source(tmp_path), TOKENIZER)
    expected = documents(first, "train"), documents(first, "validation")
    intact, damaged = sorted(lap_cache.glob(f"text/*/{name}"))
    before = intact.stat().st_mtime_ns
    if is_cut:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    else:
        flip(damaged, damaged.stat().st_size // 2)

    def read():
        prepared = prepare_text(source(tmp_path), TOKENIZER)
        return documents(prepared, "train"), documents(prepared, "validation")

    with pytest.raises(DataError, match=rf"{name} is damaged"):
        read()
    assert read() == expected
    again = prepare_text(source(tmp_path), TOKENIZER)
    assert again.identity == first.identity
    assert intact.stat().st_mtime_ns == before
