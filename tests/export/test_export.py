"""`lap export`: complete folders or none, their metadata, and verification in a separate process."""

import json
from functools import partial

import pytest
import torch
from export_support import gpt_run, vit_run, write_and_shift
from safetensors import safe_open
from safetensors.torch import load_file
from support import run_main

from lapcli.export import export as exporting
from lapcli.export.export import export_run
from lapcli.export.formats import WEIGHTS
from lapcli.runtime.errors import UsageError
from lapcli.runtime.files import read_json

pytestmark = pytest.mark.slow  # each export is verified in a process of its own


def test_the_command_verifies_the_export(tmp_path, capsys):
    """One process for each format; transformers with a padded batch."""
    pytest.importorskip("transformers", reason="the dev extra has it")
    gpt_run(tmp_path, laplacian_heads=[0, 3])
    code, out, err = run_main(capsys, "export", "--run", "gpt", "--to", "hf", "--runs-dir", str(tmp_path))
    assert code == 0, err
    record = read_json(tmp_path / "gpt" / "export" / "hf" / "lap.json", "export it again")
    assert record["verified"] is True
    assert {"logits", "logits of a padded batch", "chat template"} <= set(record["differences"])
    assert max(record["differences"].values()) < 1e-4
    assert record["laplacian_heads"] == [0, 3]
    vit_run(tmp_path)
    code, out, err = run_main(capsys, "export", "--run", "vit", "--to", "timm", "--runs-dir", str(tmp_path))
    assert code == 0, err
    assert "outputs of 3 images" in out
    assert "DIFFERS" not in out


def test_safetensors_hold_the_tensors_of_the_run(tmp_path):
    run = gpt_run(tmp_path, laplacian_heads=[0, 2])
    written = export_run(run, "safetensors")
    assert written.record["verified"] is True
    source = load_file(run.checkpoints / "step-000001" / "model.safetensors")
    tensors = load_file(written.folder / WEIGHTS)
    assert tensors.keys() == source.keys()
    assert all(torch.equal(tensors[name], source[name]) for name in source)
    with safe_open(written.folder / WEIGHTS, framework="pt") as file:
        assert file.metadata()["laplacian_heads"] == "[0, 2]"
    config = json.loads((written.folder / "config.json").read_text())
    assert (config["laplacian_heads"], config["heads"]) == ([0, 2], 4)
    assert (written.folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("to", "make"),
    [
        ("safetensors", gpt_run),
        pytest.param("hf", gpt_run, marks=pytest.mark.long),
        pytest.param("timm", vit_run, marks=pytest.mark.long),
    ],
)
def test_a_folder_that_differs_is_marked_and_exits_with_1(to, make, tmp_path, capsys, monkeypatch):
    """One tensor differs from the run's: the target library's outputs differ, and the verification finds it."""
    monkeypatch.setitem(exporting.WRITERS, to, partial(write_and_shift, exporting.WRITERS[to]))
    run = make(tmp_path)
    code, out, _ = run_main(capsys, "export", run.name, "--to", to, "--runs-dir", str(tmp_path))
    assert code == 1
    assert "DIFFERS" in out
    assert read_json(run.path / "export" / to / "lap.json", "export it again")["verified"] is False
    assert "NOT VERIFIED" in (run.path / "export" / to / "README.md").read_text()


def test_the_requested_checkpoint_is_exported(tmp_path, capsys):
    """The last, the best or a given step; the record and the file belong to its weights."""
    from lapcli import checkpoint
    from lapcli.runs import write_summary

    run = vit_run(tmp_path)
    first = load_file(run.checkpoints / "step-000001" / "model.safetensors")
    later = {name: tensor + 1 for name, tensor in first.items()}
    plan = {"laplacian_heads": str(run.recipe.model.head_plan())}
    saved = checkpoint.save(run.checkpoints, 2, later, {"x": torch.zeros(1)}, plan, {}, keep=2)
    run.update(step=2, weights_sha256=saved.weights_sha256)
    write_summary(run, {"best_step": 1, "best": {"validation_top1": 0.5}})
    for asked, step, expected in ((None, 2, later), ("best", 1, first)):
        options = [] if asked is None else ["--checkpoint", asked]
        folder = tmp_path / f"out-{asked}"
        command = ["export", "--run", "vit", "--to", "safetensors", *options, "--out", str(folder), "--no-verify"]
        code, out, err = run_main(capsys, *command, "--runs-dir", str(tmp_path))
        assert code == 0, err
        assert "not verified" in out
        record = read_json(folder / "lap.json", "")
        assert (record["step"], record["verified"]) == (step, None)
        written = load_file(folder / WEIGHTS)
        assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_unsupported_runs_are_refused_and_leave_no_files(tmp_path, capsys):
    gpt, vit = gpt_run(tmp_path), vit_run(tmp_path)
    (tmp_path / "taken").mkdir()
    cases = {
        "vit --to hf": "timm or safetensors",
        "gpt --to gguf": "gguf",
        f"gpt --to hf --out {tmp_path}/taken": "taken",
        f"gpt --to hf --out {tmp_path}/no/where": str(tmp_path / "no"),
        "gpt --to hf --checkpoint 7": "1",
    }
    for line, named in cases.items():
        code, out, err = run_main(capsys, "export", *line.split(), "--runs-dir", str(tmp_path))
        assert (code, out) == (2, ""), line
        assert named in err
    assert not (gpt.path / "export").exists()
    assert not (vit.path / "export").exists()


def test_heads_that_a_format_cannot_express_are_refused(tmp_path):
    run = gpt_run(tmp_path, laplacian_heads=0, operators={"laplacian": 1, "exclusive": 2})
    with pytest.raises(UsageError, match="exclusive"):
        export_run(run, "hf", verified=False)
    assert not (run.path / "export").exists()
    written = export_run(run, "safetensors", verified=False)
    assert "exclusive" in written.record["operators"]
