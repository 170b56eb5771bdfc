"""`lap analyze` on tiny runs of each kind, as a user types it, in this process."""

import hashlib
import io
import json
import shutil
from xml.etree import ElementTree

import pytest
from analysis_support import self_supervised_recipe
from image_support import image_recipe, picture
from PIL import Image
from support import edit_checkpoint, run_main, tiny_chat_recipe, tiny_recipe, train_here, write_text

from lapcli.analysis.measurements import MEASUREMENTS, measurements_for
from lapcli.recipe import OBJECTIVES
from lapcli.report.collect import collect
from lapcli.runs import read_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_cache):
    """Runs of two steps: vit_{0,2,4}L, gpt_{0,4}L, dino_2L."""
    folder = tmp_path_factory.mktemp("analyze")
    place = folder / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAP_CACHE", str(shared_cache))
        text = write_text(folder / "text.txt")
        for k in (0, 2, 4):
            train_here(image_recipe(model={"laplacian_heads": k}, train={"steps": 2}), place, f"vit_{k}L")
        for k in (0, 4):
            train_here(tiny_recipe(text, model={"laplacian_heads": k}, train={"steps": 2}), place, f"gpt_{k}L")
        train_here(self_supervised_recipe(train={"steps": 2}), place, "dino_2L")
    return place


def analyzed(capsys, runs, *arguments):
    code, out, err = run_main(capsys, "analyze", *arguments, "--runs-dir", str(runs))
    assert code == 0, err
    return out


def check_files(folder, what):
    """Every file that a measurement writes can be read back."""
    told = json.loads((folder / f"{what}.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert told["definition"] == MEASUREMENTS[what].definition
    if (folder / f"{what}.png").is_file():  # a single bar is not drawn
        assert min(Image.open(folder / f"{what}.png").size) > 200
    if (folder / f"{what}.svg").is_file():
        assert ElementTree.parse(folder / f"{what}.svg").getroot().tag.endswith("svg")
    return told


@pytest.mark.parametrize(
    ("pattern", "kind", "count", "tokens"),
    [("vit_*", "classification", 3, 17), ("gpt_*", "language_model", 2, 32), ("dino_*", "self_supervised", 1, 17)],
)
def test_all_applicable_measurements_run_for_each_kind(pattern, kind, count, tokens, runs, capsys, tmp_path):
    out = analyzed(capsys, runs, "all", pattern, "--limit", "16", "--out", str(tmp_path))
    fits = [
        what for what in measurements_for(OBJECTIVES[kind].gives) if what != "mixing"
    ]  # their operators have nothing learned
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == sorted(fits)
    for what in fits:
        told = check_files(tmp_path, what)
        assert f"{what}: {told['definition']}" in out
        heads = [run["laplacian_heads"][0] for run in told["runs"]]
        assert len(heads) == count
        assert heads == sorted(heads)
        for run in told["runs"]:
            weights = runs / run["name"] / "checkpoints" / "step-000002" / "model.safetensors"
            assert run["weights_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
            assert len(run["data_sha256"]) == 64
            assert run["split"] == "validation"
            assert run["tokens"] == run["sequences"] * tokens


#: Every shipped operator, in three layers of four heads.
EVERY_OPERATOR = [
    {"laplacian": 1, "gate": 1, "centered": 1},
    {"mix": {"heads": 1, "learn": ["alpha"]}, "exclusive": {"heads": 2, "gate": "tanh"}},
    {"value-only": 1, "exclusive": 1},
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["classification", "language_model", "self_supervised"])
def test_all_applicable_measurements_run_for_every_operator(kind, tmp_path, shared_cache, monkeypatch, capsys):
    """`updates` also labels each head."""
    monkeypatch.setenv("LAP_CACHE", str(shared_cache))
    model, train = {"layers": 3, "laplacian_heads": 0, "operators": EVERY_OPERATOR}, {"steps": 2}
    if kind == "language_model":
        recipe = tiny_recipe(write_text(tmp_path / "text.txt"), model=model, train=train)
    else:
        make = {"classification": image_recipe, "self_supervised": self_supervised_recipe}[kind]
        before = make().model.model_dump(exclude={"laplacian_heads", "operators", "layers"})
        recipe = make(model={**before, **model}, train={**make().train.model_dump(), **train})
    train_here(recipe, tmp_path, "every")
    out = tmp_path / "out"
    analyzed(capsys, tmp_path, "all", "--run", "every", "--limit", "16", "--out", str(out))
    fits = measurements_for(OBJECTIVES[kind].gives)
    assert sorted(path.stem for path in out.glob("*.json")) == sorted(fits)
    told = json.loads((out / "updates.json").read_text())
    assert [layer["operators"] for layer in told["runs"][0]["layers"]] == [
        ["attention", "centered", "gate", "laplacian"],
        ["attention", "exclusive", "exclusive", "mix"],
        ["attention", "attention", "exclusive", "value-only"],
    ]
    learned = {key for layer in json.loads((out / "mixing.json").read_text())["runs"][0]["layers"] for key in layer}
    assert {"mix_alpha", "exclusive_gate"} <= learned


@pytest.mark.parametrize(
    "options",
    [["--limit", "7"], ["--split", "train"]],
)
def test_a_non_default_measurement_keeps_the_default_result(options, runs, capsys):
    """A report reads both, each as its own kind."""
    analyzed(capsys, runs, "spectrum", "--run", "vit_0L")
    usual = runs / "vit_0L" / "analysis" / "spectrum.json"
    before = usual.read_bytes()
    whole = reported(runs)
    analyzed(capsys, runs, "spectrum", "--run", "vit_0L", *options)
    assert usual.read_bytes() == before
    assert reported(runs).items() > whole.items()
    shutil.rmtree(usual.parent)


def reported(runs):
    frame = collect(["vit_0L"], runs).frame
    return dict(zip(frame["measure"], frame["value"], strict=True))


def numbers(capsys, runs, *arguments):
    return json.loads(analyzed(capsys, runs, *arguments, "--json"))


def test_a_stock_timm_model(runs, capsys, tmp_path):
    name = "timm:test_vit"  # timm's own model for tests
    out = analyzed(capsys, runs, "spectrum", name, "--init", "--limit", "6", "--out", str(tmp_path))
    assert "0L, untrained" in out
    told = check_files(tmp_path, "spectrum")
    assert told["runs"][0]["laplacian_heads"][0] == 0


def test_feature_maps_of_an_image_of_any_size(runs, capsys, tmp_path):
    picture(1, size=(60, 40)).save(tmp_path / "photo.png")
    given = "features", "--run", "dino_2L", "--image", str(tmp_path / "photo.png"), "--out", str(tmp_path)
    (layer,) = numbers(capsys, runs, *given, "--limit", "2")["runs"][0]["layers"]
    assert (layer["pictures"], layer["patches"]) == (1, 48 * 72)
    check_files(tmp_path, "features")


def test_a_chat_stage_is_measured_on_its_pretraining_text(runs, capsys, tmp_path, shared_cache):
    from lapcli.runtime.progress import LogConsole
    from lapcli.training.stages import train_stages

    recipe = tiny_chat_recipe(tmp_path, sft={"train": {"steps": 2}})
    console = LogConsole(io.StringIO())
    (stage,) = train_stages(
        recipe.model_copy(update={"stages": recipe.stages.model_copy(update={"midtrain": None})}),
        read_run(runs / "gpt_4L"),
        runs_dir=runs,
        name="gpt_4L",
        console=console,
    )
    given = "spectrum", "--limit", "4", "--out", str(tmp_path)
    before, after = (numbers(capsys, runs, *given, "--run", name) for name in ("gpt_4L", "gpt_4L-sft"))
    assert after["runs"][0]["name"] == stage.name == "gpt_4L-sft"
    assert after["runs"][0]["data_sha256"] == before["runs"][0]["data_sha256"]
    assert after["runs"][0]["weights_sha256"] == stage.info["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["spectrum", "--run", "nothing"], "there is no run nothing"),
        (["spectrum", "--run", "vit_0L", "--run", "gpt_0L"], "one kind"),
        (["collapse", "--run", "gpt_0L"], "does not apply to models of language"),
        (["spectrum", "--run", "vit_0L", "--layer", "7"], "layers 0 to 1"),
        (["simplex", "--run", "vit_0L", "--classes", "1,2"], "three classes"),
        (["simplex", "--run", "vit_0L", "--classes", "1,2,cat"], "'cat'"),
        (["spectrum", "timm:resnet18", "--init"], "cannot be measured"),
        (["spectrum", "timm:vit_tinny"], "timm has no model"),
        (["cossim", "--classes", "3"], "--classes"),  # an option that would do nothing is refused
    ],
)
def test_usage_errors_are_one_message(arguments, named, runs, capsys):
    code, out, err = run_main(capsys, "analyze", *arguments, "--runs-dir", str(runs))
    assert code == 2
    assert named in err
    assert "Traceback" not in err
    assert out == ""


def test_non_finite_tokens(runs, capsys, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(runs / "vit_0L", broken)

    def too_large(weights):
        weights["blocks.1.mlp.fc2.weight"].fill_(3e38)  # finite itself

    edit_checkpoint(broken / "checkpoints" / "step-000002", "model.safetensors", too_large)
    code, _, err = run_main(capsys, "analyze", "all", "--run", str(broken), "--checkpoint", "2", "--limit", "4")
    assert code == 1
    assert "layer 1 of broken" in err
    assert "Traceback" not in err
