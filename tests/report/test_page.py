"""The page: whole, escaped, without anything from elsewhere; and in a real browser, where there is one."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
from browser_support import browser
from report_support import write_analysis, write_run
from support import run_main

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><rect width="40" height="20" fill="#09f"/></svg>'


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two drop paths, a gap, an analysis with a figure, an unfinished run, and a recipe with markup in it."""
    runs = tmp_path_factory.mktemp("page")
    analysed = {}
    for heads in (0, 2, 4):
        for seed in (0, 1):
            for rate in ("0.0", "0.1"):
                name = f"digits_{heads}L_{rate}_{seed}"
                scores = {"top1": 0.9 + heads / 100 + seed / 500} if (heads, rate) != (2, "0.1") else None
                change = [f"model.drop_path={rate}"]
                write_run(
                    runs, name, heads=heads, seed=seed, change=change, scores=scores, curve=[2.0, 1.0, 0.5 + seed]
                )
            shares = {
                "between_class_share": 0.2 + heads / 10,
                "within_class_share": 0.3,
                "within_sequence_share": 0.5 - heads / 10,
            }
            analysed[f"digits_{heads}L_0.0_{seed}"] = (heads, 4, [{"layer": 3, **shares, "k_0.99": 9.0 - heads}])
    for what in ("anova", "spectrum"):
        for place in (runs / "analysis", runs / "analysis" / "two+others"):  # of several runs; of a set by its names
            write_analysis(place, what, analysed)
            (place / f"{what}.svg").write_text(SVG)
    write_run(runs, "half", "quickstart", heads=2, status="interrupted")
    evil = write_run(runs, "evil", "quickstart", heads=0, change=[f"validation.prompts={json.dumps([EVIL])}"])
    info = json.loads((evil / "run.json").read_text())
    (evil / "run.json").write_text(json.dumps({**info, "data": EVIL, "device": EVIL}))
    return runs


@pytest.fixture(scope="module")
def written(page):
    from lapcli.report.assemble import report_on
    from lapcli.report.page import write_page

    paths = write_page(report_on([], page), page / "report.html")
    return page, paths


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_nothing_comes_from_elsewhere_and_nothing_runs(written):
    _, (path, _) = written
    text = path.read_text()
    elements = Elements(text).found
    assert "script" not in {tag for tag, _ in elements}
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)", text)
    assert {tag for tag, _ in elements} >= {"table", "svg", "figure", "style", "details"}


def test_text_from_recipes_is_escaped(written):
    _, (path, _) = written
    text = path.read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_it_says_what_was_run(written):
    runs, (path, _) = written
    text = path.read_text()
    weights = json.loads((runs / "digits_0L_0.0_0" / "run.json").read_text())["weights_sha256"]
    for expected in (weights[:16], "torch 2.15.0", "half is interrupted at step 40 of 100", "ddof", "no score"):
        assert expected in text, expected
    assert len(re.findall(r'class="claim ', text)) >= 20


def test_each_set_of_runs_keeps_its_analyses(written):
    page, _ = written
    text = (page / "report.html").read_text()
    for title in ("anova, several runs", "anova, two+others", "spectrum, two+others"):
        assert f"<figcaption>{title}</figcaption>" in text


def test_figures_are_files_too(written):
    _, (_, folder) = written
    names = {path.name for path in folder.iterdir()}
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".png"}
    for what in ("top1", "components", "shares", "loss-1"):
        assert [name for name in names if name.endswith(f"{what}.svg")], what
        assert [name for name in names if name.endswith(f"{what}.png")], what
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_same_runs_give_the_same_page(written, tmp_path, capsys):
    runs, (path, _) = written
    code, out, _ = run_main(
        capsys, "report", "--runs-dir", str(runs), "--format", "html", "--out", str(tmp_path / "p.html")
    )
    assert code == 0
    assert out.split() == [str(tmp_path / "p.html"), str(tmp_path / "p_figures")]
    assert (tmp_path / "p.html").read_text() == path.read_text()
    shutil.rmtree(tmp_path / "p_figures")


#: Every table, figure and drawing that is laid out with no size, or that the page cannot be scrolled to.
HIDDEN = """[...document.querySelectorAll('article table, figure, figure svg, figure img')].filter(e => {
  const box = e.getBoundingClientRect();
  return box.width < 60 || box.height < 20 || (e.tagName == 'IMG' && !e.naturalWidth);
}).map(e => e.outerHTML.slice(0, 80))"""
#: Things wider than the screen that are not inside a box of their own that scrolls.
BEYOND = """[...document.querySelectorAll('body *')].filter(e =>
  e.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !e.closest('.wide') && !e.closest('svg')
).map(e => e.outerHTML.slice(0, 80))"""
CONTRAST = """(() => {
  const light = s => { const [r, g, b] = s.match(/\\d+/g).map(Number).map(v => (v /= 255) <= 0.04045 ? v / 12.92
    : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const page = light(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll('h1, td, small, figcaption, .badge, svg text')].map(e => {
    const style = getComputedStyle(e);
    const own = light(e.closest('svg') ? style.fill : style.color);
    return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05); }).reduce((a, b) => Math.min(a, b), 21);
})()"""


def test_in_a_browser(written):
    _, (path, _) = written
    with browser() as tab:
        for width in (1280, 390):
            for dark in (False, True):
                tab.open(path, width, dark=dark)
                assert tab.ask("document.querySelectorAll('article table').length") >= 6
                assert tab.ask("document.querySelectorAll('figure svg').length") >= 5
                assert tab.ask(HIDDEN) == []
                assert tab.ask(BEYOND) == []
                assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
                assert tab.ask(CONTRAST) >= 4.5, (width, dark)
        dark_page = tab.ask("getComputedStyle(document.body).backgroundColor")
        tab.open(path, 1280)
        assert tab.ask("getComputedStyle(document.body).backgroundColor") != dark_page
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} == {"file", "data"}
        assert {url for url in tab.requests() if url.startswith("file")} == {path.as_uri()[:100]}
        printed = tab.call("Page.printToPDF")["data"]
        assert printed.startswith("JVBER")  # %PDF
