"""A measurement is one file or one call from outside: help, `all`, options, output and reports know it from then on."""

import json
import pkgutil
import sys

import pytest
import torch
from report_support import write_analysis, write_run
from support import run_main, run_process
from typer.main import get_command

from lapcli.analysis import measurements
from lapcli.analysis.drawing import figure_by_layer
from lapcli.analysis.measurement import LayerResult, Measurement
from lapcli.analysis.measurements import MEASUREMENTS
from lapcli.cli import app
from lapcli.commands.sweep import _parsed
from lapcli.recipe.schema import FEATURES
from lapcli.report.collect import collect
from lapcli.runtime.errors import UsageError
from lapcli.runtime.plugins import Extensions, Origin


class Lengths(Measurement):
    """Mean length of the tokens of images: what somebody else might add."""

    name = "lengths"
    help = "Mean length of the tokens."
    definition = "Length of a token, averaged over all tokens."
    options = ("layer", "tokens")
    needs = frozenset({FEATURES})
    default_layers = "all"
    columns = {"length": "mean length"}  # noqa: RUF012
    counts = frozenset({"tokens_seen"})

    def listen(self, capture, layer):
        lengths = []
        capture.on_tokens(self.site(layer), lambda tokens, _: lengths.append(tokens.norm(dim=2)))

        class Accumulator:
            def result(self):
                seen = torch.cat(lengths)
                return LayerResult({"length": float(seen.mean()), "tokens_seen": seen.numel()})

        return Accumulator()

    @classmethod
    def draw(cls, analysis):
        return figure_by_layer(analysis.runs, "length", "mean length")


@pytest.fixture
def added(monkeypatch):
    """As the `register` of another package would add it; forgotten after the test."""
    monkeypatch.setattr("lapcli.runtime.plugins._added", {})
    Extensions(Origin("ruler", "1.2")).add("analysis", Lengths)


def test_each_file_holds_one_measurement_of_its_name():
    files = [found.name for found in pkgutil.iter_modules(measurements.__path__)]
    assert sorted(MEASUREMENTS.built_in()) == sorted(files)
    for name in files:
        assert MEASUREMENTS[name].__module__ == f"{measurements.__name__}.{name}"


@pytest.mark.slow
@pytest.mark.usefixtures("added")
def test_one_from_outside_has_output(capsys, tmp_path):
    model = ["--model", "timm:test_vit", "--init", "--limit", "3", "--out", str(tmp_path)]
    code, out, err = run_main(capsys, "analyze", "lengths", *model)
    assert code == 0, err
    assert "mean length" in out
    assert {"lengths.json", "lengths.csv", "lengths.png", "lengths.svg"} <= {path.name for path in tmp_path.iterdir()}
    told = json.loads((tmp_path / "lengths.json").read_text())
    assert told["definition"] == Lengths.definition
    assert told["settings"] == {"layer": "all", "tokens": "all", "seed": 0, "limit": 3}
    assert (told["package"], told["package_version"]) == ("ruler", "1.2")
    code, _, err = run_main(capsys, "analyze", "lengths", *model, "--norm", "after")  # it has no such option
    assert (code, "--norm" in err) == (2, True)


@pytest.mark.usefixtures("added")
def test_one_from_outside_may_follow_the_cells_of_a_sweep():
    given = _parsed(get_command(app), ["analyze", "lengths", "--layer", "3"])
    assert (given.params["what"], given.params["layer"]) == ("lengths", "3")
    with pytest.raises(UsageError, match="lenghts"):
        _parsed(get_command(app), ["analyze", "lenghts"])


@pytest.mark.usefixtures("added")
def test_one_from_outside_is_in_reports(tmp_path):
    path = write_run(tmp_path, "vit")
    write_analysis(path, "lengths", {3: {"length": 3.0}})
    write_analysis(path, "lengths", {3: {"length": 9.0}}, conditions={"tokens": "patch"})
    frame = collect([], tmp_path).frame
    found = dict(zip(frame["measure"], frame["value"], strict=True))
    assert found["lengths.length"] == 3.0  # not averaged with that of other tokens
    assert found["lengths.length [tokens patch]"] == 9.0


def test_a_declaration_that_is_not_complete_is_refused():
    with pytest.raises(TypeError, match="Empty does not declare help, definition, columns"):
        type("Empty", (Measurement,), {"name": "empty"})


def test_help_and_wrong_usage_are_answered_without_torch(tmp_path):
    """In a process of its own, in which nothing has been imported yet."""
    lines = [
        ["analyze", "-h"],
        ["analyze", "spectrun"],
        ["analyze", "spectrum", "--run", "nobody"],
        ["analyze", "cossim", "--classes", "3"],
        ["analyze", "features", "--model", "timm:test_vit", "--image", "nowhere.png"],
    ]
    code = f"""
import sys
from lapcli.cli import main
codes = []
for line in {lines!r}:
    sys.argv[1:] = line
    try: main()
    except SystemExit as stop: codes.append(stop.code)
print(codes, *sys.modules, file=sys.stderr)
"""
    done = run_process([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(str([0] + [2] * 4))
    assert not set(last.split()) & {"torch", "timm", "matplotlib", "sklearn"}
    assert "nowhere.png" in done.stderr
