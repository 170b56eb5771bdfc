"""The page: whole, escaped, without anything from elsewhere; and in a real browser, where there is one."""

import base64
import csv
import gzip
import hashlib
import html
import json
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser_support import browser
from PIL import Image
from report_support import LOCKS, write_analysis, write_run
from support import ROOT, run_main

from lapcli.analysis.drawing import FigureFormat
from lapcli.recipe import load_recipe, recipe_to_yaml
from lapcli.report.assemble import report_on
from lapcli.report.claims import claims
from lapcli.report.collect import find_paths
from lapcli.report.page import _csv_address, write_page
from lapcli.report.watching import watch_page

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
    write_run(runs, "dino", "dino_quickstart", heads=0)  # a third kind
    evil = write_run(runs, "evil", "quickstart", heads=0, change=[f"validation.prompts={json.dumps([EVIL])}"])
    info = json.loads((evil / "run.json").read_text())
    (evil / "run.json").write_text(json.dumps({**info, "data": EVIL, "device": EVIL}))
    return runs


@pytest.fixture(scope="module")
def written(page):
    paths = write_page(report_on([], page), page / "report.html")
    return page, paths


class Elements(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


def test_nothing_comes_from_elsewhere_and_one_script_runs(written):
    """The security policy names the script by its hash, so that markup which slipped through would not run either."""
    _, (path, _) = written
    text = path.read_text()
    elements = Elements(text).found
    assert [tag for tag, _ in elements].count("script") == 1
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for tag, a in elements if a.get("http-equiv") == "Content-Security-Policy")
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    for tag, attributes in elements:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:")), (tag, attributes)
    assert not re.search(r"@import|url\((?!#)|innerHTML|eval\(", text)
    assert {tag for tag, _ in elements} >= {"table", "svg", "figure", "style", "details", "nav"}


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


def test_what_was_run_comes_first_and_claims_that_were_not_are_one_line(written):
    _, (path, _) = written
    text = path.read_text()
    order = re.findall(r'<section id="([a-z]+)', text)
    assert order == ["experiment"] * order.count("experiment") + ["paper", "claims", "runs", "notes"]
    assert order.count("experiment") >= 2
    assert re.findall(r'<a href="#([\w-]+)">', text) == re.findall(r'<section id="([\w-]+)"', text)
    told, line = text.count('<details class="claim'), re.search(r"(\d+) claims of the paper were not run", text)
    assert told + int(line[1]) == len(claims())
    assert 0 < told < len(claims()) / 2
    for heading in re.findall(r"<h[1-3]>([^<]+)", text):
        assert not re.search(r"\w\.\w+_|laplacian_heads|_loss", heading), heading  # words, not keys


def addresses(text, kind):
    return re.findall(rf'download="([^"]+)" href="data:{kind};base64,([^"]+)"', text)


def test_each_figure_has_its_data(written):
    _, (path, folder) = written
    text = path.read_text()
    found = dict(addresses(text, "text/csv"))
    assert text.count("<figure data-chart=") == len(list(folder.glob("*.csv")))
    for file in folder.glob("*.csv"):
        assert base64.b64decode(found[file.name]).decode() == file.read_text()
    curve = next(file for file in folder.glob("*digits*-loss-1.csv"))
    rows = [row for row in csv.DictReader(curve.open()) if row["run"] == "digits_2L_0.0_1"]
    assert [(row["line"], row["step"], float(row["training loss"])) for row in rows] == [
        ("2 Laplacian", "25", 2.0),  # as metrics.jsonl has them
        ("2 Laplacian", "50", 1.0),
        ("2 Laplacian", "75", 1.5),
    ]
    means = next(file for file in folder.glob("*top1-by-heads.csv"))
    rows = [row for row in csv.DictReader(means.open()) if row["line"].endswith("0.0")]
    assert [(row["Laplacian heads (of 4)"], row["seeds"]) for row in rows] == [("0", "2"), ("2", "2"), ("4", "2")]
    assert [float(row["top-1 (%)"]) for row in rows] == pytest.approx([90.1, 92.1, 94.1])


def test_data_that_is_long_is_compressed():
    content = b"run,value\n" * 100_000
    address, ending = _csv_address(content)
    assert ending == ".csv.gz"
    assert gzip.decompress(base64.b64decode(address.partition(",")[2])) == content


def test_each_set_of_runs_keeps_its_analyses(written):
    page, _ = written
    text = (page / "report.html").read_text()
    captions = re.findall(r"<figcaption>(Of digits[^<]*)", text)
    assert len(captions) == 4
    assert all("digits_0L_0.0_0, digits_0L_0.0_1" in caption for caption in captions)


def test_figures_are_files_too(written):
    _, (_, folder) = written
    names = {path.name for path in folder.iterdir()}
    assert {path.suffix for path in folder.iterdir()} == {".svg", ".png", ".csv"}
    for what in ("top1-by-heads", "components-by-heads", "shares-by-heads", "loss-1"):
        assert [name for name in names if name.endswith(f"{what}.svg")], what
        assert [name for name in names if name.endswith(f"{what}.png")], what
    for path in folder.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_figures_alone_in_the_size_that_is_asked_for(page, tmp_path, capsys):
    options = ("--format", "png", "--size", "3x2", "--dpi", "50", "--out", str(tmp_path / "drawn"))
    code, out, err = run_main(capsys, "report", "digits_0L*", "--runs-dir", str(page), *options)
    assert code == 0, err
    pictures = [Path(line) for line in out.split() if line.endswith(".png")]
    assert {Image.open(path).size for path in pictures} == {(150, 100)}
    options = ("--format", "pdf", "--out", str(tmp_path / "drawn"))
    assert run_main(capsys, "report", "digits_0L*", "--runs-dir", str(page), *options)[0] == 0
    assert {path.suffix for path in (tmp_path / "drawn").iterdir()} == {".pdf", ".csv"}  # the PNGs are replaced
    assert all(path.read_bytes().startswith(b"%PDF") for path in (tmp_path / "drawn").glob("*.pdf"))
    for size in ("3", "0x4", "wide"):
        code, _, err = run_main(capsys, "report", "--runs-dir", str(page), "--format", "svg", "--size", size)
        assert (code, "as in 6x4" in err) == (2, True)


def test_the_same_runs_give_the_same_page(written, tmp_path, capsys):
    runs, (path, _) = written
    code, out, _ = run_main(
        capsys, "report", "--runs-dir", str(runs), "--format", "html", "--out", str(tmp_path / "p.html")
    )
    assert code == 0
    assert out.split() == [str(tmp_path / "p.html"), str(tmp_path / "p_figures")]
    assert (tmp_path / "p.html").read_text() == path.read_text()
    shutil.rmtree(tmp_path / "p_figures")


def test_every_training_is_told_as_a_command_that_gives_its_recipe(written):
    """The command is read as `lap train` reads it, and gives the recipe that the run keeps."""
    runs, (path, _) = written
    told = [html.unescape(line) for line in re.findall(r'<code class="command">([^<]*)</code>', path.read_text())]
    trained = [shlex.split(line) for line in told if line.startswith("lap train")]
    assert {words[words.index("--name") + 1] for words in trained} == {
        path.parent.name for path in runs.glob("*/run.json")
    }
    for words in trained:
        settings = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        name, seed = words[words.index("--name") + 1], int(words[words.index("--seed") + 1])
        loaded = load_recipe(ROOT / "recipes" / f"{words[2]}.yaml", settings, seed)
        assert recipe_to_yaml(loaded) == (runs / name / "recipe.yaml").read_text()
    where = shlex.join(["--runs-dir", str(runs)])
    assert f"lap eval --run digits_0L_0.0_0 --tasks top1 {where}" in told
    assert f"lap analyze anova --run digits_2L_0.0_1 {where}" in told


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
                assert tab.ask("document.querySelectorAll('article table').length") >= 4
                assert tab.ask("document.querySelectorAll('figure svg').length") >= 5
                assert tab.ask(HIDDEN) == []
                assert tab.ask(BEYOND) == []
                assert tab.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
                assert tab.ask(CONTRAST) >= 4.5, (width, dark)
        dark_page = tab.ask("getComputedStyle(document.body).backgroundColor")
        tab.open(path, 1280)
        assert tab.ask("getComputedStyle(document.body).backgroundColor") != dark_page
        _use(tab, path)
        assert tab.complaints() == []
        assert {url.split(":")[0] for url in tab.requests()} == {"file", "data"}
        assert {url for url in tab.requests() if url.startswith("file")} == {path.as_uri()[:100]}
        _print(tab, path)


def _print(tab, path):
    """On A4 with the browser's margins nothing stands beyond the paper, is folded, or needs a screen."""
    tab.open(path, 718)
    tab.call("Emulation.setEmulatedMedia", media="print")
    tab.ask("dispatchEvent(new Event('beforeprint'))")
    assert tab.ask(BEYOND.replace("!e.closest('.wide')", "e.offsetParent")) == []
    assert tab.ask("document.querySelectorAll('details:not([open])').length") == 0
    assert tab.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    commands = "[...document.querySelectorAll('.command')].filter(e => e.offsetParent).map(e => e.textContent)"
    shown = tab.ask(commands)
    assert any(line.startswith("lap train") for line in shown)
    assert any(line.startswith("lap analyze") for line in shown)
    assert tab.call("Page.printToPDF")["data"].startswith("JVBER")  # %PDF


#: Where the first point of a run's line is on the screen.
POINT = """(() => {
  const figure = document.querySelector('figure[data-chart]'), chart = JSON.parse(figure.dataset.chart);
  const line = chart.lines.find(l => l.points.length > 1), [x, y] = line.points[1];
  const svg = figure.querySelector('svg');
  svg.scrollIntoView({block: 'center'});
  const outer = svg.getBoundingClientRect(), scale = outer.width / svg.viewBox.baseVal.width, b = chart.box;
  const px = b[0] + (x - chart.x[0]) / (chart.x[1] - chart.x[0]) * (b[2] - b[0]);
  const py = b[3] - (y - chart.y[0]) / (chart.y[1] - chart.y[0]) * (b[3] - b[1]);
  const path = document.getElementById(line.id).querySelector('path').getBoundingClientRect();
  return {x: outer.left + px * scale, y: outer.top + py * scale, run: line.run, id: line.id, step: x, value: y,
          drawn: [path.left, path.right, path.top, path.bottom]};
})()"""


def _use(tab, path):
    """As a reader does: the pointer over a point, a run that is hidden, a table that is wider than the screen."""
    tab.open(path, 1280)
    point = tab.ask(POINT)
    left, right, top, bottom = point["drawn"]  # the place that the script computes is on the line that was drawn
    assert left - 2 <= point["x"] <= right + 2
    assert top - 2 <= point["y"] <= bottom + 2
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=point["x"] + 3, y=point["y"] - 3)
    tip = tab.ask("[document.querySelector('.tip').hidden, document.querySelector('.tip').textContent]")
    assert tip[0] is False
    for part in (point["run"], f"step {point['step']}", f"{point['value']:.4g}"):
        assert part in tip[1], (part, tip)
    shown = f"getComputedStyle(document.getElementById('{point['id']}')).display"
    button = f"""[...document.querySelectorAll('button.seed')].find(b => b.dataset.runs == '["{point["run"]}"]')"""
    assert tab.ask(shown) != "none"
    tab.ask(f"{button}.click()")
    assert (tab.ask(shown), tab.ask(f"{button}.getAttribute('aria-pressed')")) == ("none", "false")
    tab.open(path, 390)  # what was hidden stays hidden when the page is loaded again
    assert tab.ask(shown) == "none"
    tab.ask(f"{button}.click()")
    assert tab.ask(shown) != "none"
    sizes = "[e.scrollWidth > e.clientWidth, e.offsetHeight - e.clientHeight]"
    ((scrolls, bar),) = tab.ask(f"[...document.querySelectorAll('#runs .wide')].map(e => {sizes})")
    assert scrolls
    assert bar > 6  # pixels of a scroll bar that does not hide


def test_the_last_change_is_the_last_in_every_time_zone(tmp_path):
    """9:00 in Tokyo is midnight in UTC, three hours before the other run was written."""
    for name, moment in (("early", "2026-01-01T09:00:00+0900"), ("late", "2026-01-01T05:00:00+0200")):
        path = write_run(tmp_path / "runs", name, heads=2)
        info = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps({**info, "updated": moment}))
    (page,) = write_page(report_on([], tmp_path / "runs"), tmp_path / "page.html")[:1]
    assert "the last change 2026-01-01 03:00 UTC" in page.read_text()


def test_the_page_is_written_again_until_no_run_goes_on(tmp_path):
    """A run that ends while it is watched: the page loads itself while it goes on, and no longer afterwards."""
    runs = tmp_path / "runs"
    path = write_run(runs, "one", heads=2, status="running")
    page = tmp_path / "page.html"
    told = []

    def make():
        told.append(page.read_text() if page.is_file() else "")
        if len(told) == 2:
            info = json.loads((path / "run.json").read_text())
            (path / "run.json").write_text(json.dumps({**info, "status": "finished", "step": 100}))
            (path / "summary.json").write_text(json.dumps({"end": {"validation_loss": 1.0}}))
            (path / "checkpoints" / "step-000100").mkdir(parents=True)
        return report_on([], runs)

    watch_page(lambda: [path], make, page, FigureFormat(), 0.01)
    assert len(told) == 2
    assert 'http-equiv="refresh"' in told[1]
    assert "running at step" in told[1]
    assert 'http-equiv="refresh"' not in page.read_text()
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_what_is_written_while_the_page_is_made_is_on_the_next_one(tmp_path):
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    path = write_run(runs, "one", heads=2, status="running")
    info = json.loads((path / "run.json").read_text())
    told = []

    def make():
        told.append(page.read_text() if page.is_file() else "")
        report = report_on([], runs)
        if len(told) == 1:  # the run goes on after it was read
            (path / "run.json").write_text(json.dumps({**info, "step": 60}))
        if len(told) == 3:
            raise KeyboardInterrupt
        return report

    watch_page(lambda: find_paths([], runs), make, page, FigureFormat(), 0.01)
    assert "running at step 40" in told[1]
    assert "running at step 60" in told[2]


def test_a_run_whose_process_was_killed_is_shown_as_interrupted_beside_one_that_goes_on(tmp_path):
    """A kill changes no file of the run: the kernel alone frees its lock."""
    runs, page = tmp_path / "runs", tmp_path / "page.html"
    for name in ("killed", "kept"):
        write_run(runs, name, heads=2, status="running")
    killed = LOCKS[-2]
    told = []

    def make():
        told.append(page.read_text() if page.is_file() else "")
        if len(told) == 2:
            killed.release()
        if len(told) == 4:
            raise KeyboardInterrupt
        return report_on([], runs)

    watch_page(lambda: find_paths([], runs), make, page, FigureFormat(), 0.01)
    assert "killed is interrupted" not in told[1]
    assert "killed is interrupted" in told[2]
    assert "kept is running" in told[2]


def test_ctrl_c_leaves_a_page_that_rests(tmp_path, monkeypatch):
    path = write_run(tmp_path / "runs", "one", heads=2, status="running")
    page = tmp_path / "page.html"

    def interrupt(seconds):
        assert 'http-equiv="refresh"' in page.read_text()
        raise KeyboardInterrupt

    monkeypatch.setattr("lapcli.report.watching.time.sleep", interrupt)
    watch_page(lambda: [path], lambda: report_on([], tmp_path / "runs"), page, FigureFormat(), 5)
    assert 'http-equiv="refresh"' not in page.read_text()


def test_watch_without_a_page_is_refused(capsys, page):
    code, _, err = run_main(capsys, "report", "--runs-dir", str(page), "--watch")
    assert (code, "--format html" in err) == (2, True)
