import json
import sys

from lapcli.data.text.builtin import builtin_documents, builtin_text


def test_builtin_text_is_the_documentation_of_this_python():
    path = builtin_text()
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert 1_000_000 < sum(map(len, texts)) < 5_000_000
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if len(paragraph) >= 40]
    assert len(paragraphs) == len(set(paragraphs)), "what is held out is also trained on"
    assert any('The "with" statement' in text for text in texts)
    (module,) = (text for text in texts if text.startswith("textwrap\n"))
    import textwrap

    assert textwrap.fill.__doc__.splitlines()[0] in module


def test_sources_are_never_executed(tmp_path):
    (tmp_path / "evil.py").write_text('"""A docstring."""\nraise SystemExit("ran")\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "latin.py").write_bytes(b'"""\xe9"""\n')
    (tmp_path / "nowhere.py").symlink_to(tmp_path / "missing.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(
        'class A:\n    """Of A."""\n    if True:\n        async def f(self):\n            """Of f."""\n'
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text('"""Not this."""\n')
    assert list(builtin_documents(tmp_path)) == [
        "evil\n\nA docstring.\n",
        "package.A\n\nOf A.\n\npackage.A.f\n\nOf f.\n",
    ]
    assert "evil" not in sys.modules
