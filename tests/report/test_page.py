"""The page: complete, escaped, without external resources; and in a real browser if there is one."""

import base64
import csv
import hashlib
import html
import io
import json
import re
import shlex
from html.parser import HTMLParser

import pytest
from browser_support import browser
from report_support import write_analysis, write_run
from support import run_main

from lapcli.report.page import write_page
from lapcli.report.tables import report_on

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">'
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 20"><rect width="40" height="20" fill="#09f"/></svg>'


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two drop paths, a gap, an analysis with a figure, an unfinished run, and a recipe with markup in it."""
    runs = tmp_path_factory.mktemp("page")
    for heads in (0, 2, 4):
        for seed in (0, 1):
            for rate in ("0.0", "0.1"):
                scores = {"top1": 0.9 + heads / 100 + seed / 500} if (heads, rate) != (2, "0.1") else None
                told = {"heads": heads, "seed": seed, "change": [f"model.drop_path={rate}"], "scores": scores}
                path = write_run(runs, f"digits_{rate}_{heads}L_{seed}", **told, curve=[2.0, 1.0, 0.5 + seed])
                write_analysis(path, "spectrum", {3: {"k_0.99": 9.0 - heads + seed}})
    (runs / "analysis").mkdir()
    (runs / "analysis" / "spectrum.json").write_text(
        json.dumps({"what": "spectrum", "runs": [{"name": "digits_0.0_0L_0"}, {"name": "digits_0.0_2L_0"}]})
    )
    (runs / "analysis" / "spectrum.svg").write_text(SVG)
    write_run(runs, "half", "quickstart", heads=2, status="interrupted")
    evil = write_run(runs, "evil", "quickstart", heads=0, change=[f"validation.prompts={json.dumps([EVIL])}"])
    info = json.loads((evil / "run.json").read_text())
    (evil / "run.json").write_text(json.dumps({**info, "data": EVIL, "device": EVIL}))
    path, folder = write_page(report_on([], runs), runs / "report.html")
    return runs, path, folder


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_no_external_resources_and_only_listed_scripts(written):
    _, path, _ = written
    text = path.read_text()
    elements = Elements(text).found
    policy = next(a["content"] for _, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert scripts
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert EVIL not in text
    assert html.escape(EVIL)[:30] in text


def test_headings_are_short_and_comparisons_come_first(written):
    _, path, _ = written
    headings = re.findall(r"<h2>(.*?)</h2>", path.read_text())
    assert max(len(html.unescape(each)) for each in headings) <= 60
    assert "2 drop paths" in headings[0]  # the only experiment that compares rows, and not the newest


def test_each_table_names_the_command_that_reproduces_it(written, capsys):
    _, path, _ = written
    commands = [
        html.unescape(each) for each in re.findall(r'<code class="command">(lap report .*?)</code>', path.read_text())
    ]
    assert len(commands) >= 3
    means = []
    for command in commands:
        code, out, err = run_main(capsys, *shlex.split(command)[1:], "--format", "json")
        assert code == 0, err
        means += [cell["mean"] for table in json.loads(out) for row in table["rows"] for cell in row["cells"].values()]
    assert {f"{mean:.2f}" for mean in means if mean and mean > 80} <= set(re.findall(r"\d+\.\d\d", path.read_text()))


def test_each_figure_is_a_file_in_three_forms_with_its_data(written):
    _, path, folder = written
    names = {file.stem for file in folder.iterdir()}
    assert {file.name for file in folder.iterdir()} == {f"{n}.{f}" for n in names for f in ("png", "svg", "pdf", "csv")}
    (scores,) = [name for name in names if name.endswith("top1-by-rows")]
    rows = list(csv.DictReader(io.StringIO((folder / f"{scores}.csv").read_text())))
    first = next(row for row in rows if row["Laplacian heads"] == "2.0")
    assert float(first["top-1 (%)"]) == pytest.approx(92.1)
    assert (float(first["standard deviation"]), first["seeds"]) == (pytest.approx(0.1414, abs=1e-3), "2")
    downloads = [a["href"] for tag, a in Elements(path.read_text()).found if "download" in a]
    assert (folder / f"{scores}.csv").read_bytes() in [base64.b64decode(each.split(",")[1]) for each in downloads]


#: Elements beyond the page edge, outside of scrollable containers.
BEYOND = """[...document.querySelectorAll('h1, h2, p, td, figure, .command')].filter(e =>
  !e.closest('.wide') && e.offsetParent && e.getBoundingClientRect().right >
    document.documentElement.clientWidth + 1).map(e => e.textContent.slice(0, 40))"""
CONTRAST = """(() => {
  const light = c => {
    const [r, g, b] = c.match(/[0-9.]+/g).map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b; };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const shown = document.querySelectorAll('h1, td, small, figcaption, .badge, svg .xtick text, svg .legendtext');
  return [...shown].map(e => {
    const style = getComputedStyle(e), own = light(e.closest('svg') ? style.fill : style.color);
    return (Math.max(own, page) + .05) / (Math.min(own, page) + .05); }).reduce((a, b) => Math.min(a, b), 21);
})()"""


@pytest.mark.long
def test_the_page_in_a_browser(written):
    _, path, _ = written
    with browser() as tab:
        for width in (1280, 390):
            for dark in (False, True):
                tab.open(path, width, dark=dark)
                assert tab.ask("document.querySelectorAll('figure .js-plotly-plot .scatterlayer .trace').length") >= 10
                assert tab.ask(BEYOND) == []
                assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
                assert tab.ask(CONTRAST) >= 4.5, (width, dark)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} <= {"file", "data", "blob"}
        tab.open(path, 718)
        tab.call("Emulation.setEmulatedMedia", media="print")
        assert tab.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
        assert tab.call("Page.printToPDF")["data"].startswith("JVBER")  # %PDF
