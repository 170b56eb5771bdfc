"""A small text on disk for the tests of text data, and the documents of its prepared stream."""

import json

from lapcli.recipe.schema import TextSource, TokenizerSection

TOKENIZER = TokenizerSection(vocab=280)


def jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def story(number):
    return f"number {number}: once upon a time there was a token, and it was number {number}."


def write_stories(path, count=100):
    return jsonl(path, [story(i) for i in range(count)])


def source(path, **keys):
    return TextSource(train=str(path), **keys)


def documents(prepared, part):
    stream = getattr(prepared, part)
    parts = prepared.tokenizer.decode(stream.read(0, len(stream))).split("<|bos|>")
    assert parts[0] == "", "the stream begins with BOS"
    return parts[1:]


def flip(path, place, bits=1):
    """Damages one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)
