"""`lap push`: says what it would send, and refuses what it must not send. Nothing leaves the machine in tests."""

import pytest
from export_support import vit_run
from support import run_main

from lapcli.export.export import export_run
from lapcli.runtime.files import read_json, write_json


@pytest.fixture
def folder(tmp_path):
    return export_run(vit_run(tmp_path), "timm", verified=False).folder


def test_a_dry_run_names_every_file_and_sends_nothing(folder, capsys, monkeypatch):
    monkeypatch.setattr("lapcli.export.push.HfApi", None)  # whoever asked for the hub would fail
    code, out, err = run_main(capsys, "push", str(folder), "--to", "me/digits")
    assert code == 0, err
    for path in folder.iterdir():
        assert f"{path.name:<26}{path.stat().st_size:>16,} bytes" in out
    assert "nothing was sent" in out
    assert "not verified, to me/digits (private if it is new)" in out


def test_offline_is_respected(folder, capsys):
    code, _, err = run_main(capsys, "push", str(folder), "--to", "me/digits", "--yes")
    assert code == 2
    assert "HF_HUB_OFFLINE is set" in err


def test_what_is_not_sent(folder, tmp_path, capsys):
    def refused(*words):
        code, out, err = run_main(capsys, "push", *words)
        assert (code, out) == (2, "")
        return err

    assert "takes OWNER/NAME" in refused(str(folder), "--to", "digits")
    assert "takes OWNER/NAME" in refused(str(folder), "--to", "me/dig its")
    assert "is not an exported folder" in refused(str(tmp_path), "--to", "me/digits")
    (folder / "secret.txt").write_text("mine")
    assert "was not written by lap export" in refused(str(folder), "--to", "me/digits")
    (folder / "secret.txt").unlink()
    record = read_json(folder / "lap.json", "")
    write_json(folder / "lap.json", {**record, "verified": False})
    assert "failed its verification" in refused(str(folder), "--to", "me/digits")
    write_json(folder / "lap.json", record)
    (folder / "config.json").write_text("{}")
    assert "was changed after the export" in refused(str(folder), "--to", "me/digits")
