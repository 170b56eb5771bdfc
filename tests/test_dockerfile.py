"""The steps of the Dockerfile, in a clean folder and environment: the copied files suffice to install and run `lap`."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

pytestmark = pytest.mark.long  # installs the package and everything that it needs


def test_the_files_copied_by_the_dockerfile_install_and_train(tmp_path):
    lines = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    source, environment, work = (tmp_path / name for name in ("opt", "environment", "work"))
    for folder in (source, work):
        folder.mkdir()
    for *names, target in (line.split()[1:] for line in lines if line.startswith("COPY ")):
        for name in names:
            copied = source / target / ("" if (ROOT / name).is_dir() else name)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, copied)
    (install,) = (line for line in lines if line.startswith("RUN ") and "EXTRAS" in line)
    # With DEVICE=cuda, torch comes from the default index. In the image this is the system environment.
    command = install.removeprefix("RUN ").replace("--system", "").replace("--no-cache", "")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean |= {"VIRTUAL_ENV": str(environment), "DEVICE": "cuda", "EXTRAS": "all"}
    clean["PATH"] = f"{environment / 'bin'}:{Path(sys.executable).parent}:{clean['PATH']}"

    def run(command: str, cwd: Path) -> str:
        done = subprocess.run(["sh", "-ec", command], cwd=cwd, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    run(f"uv venv {environment}", tmp_path)
    run(command, source)
    shutil.rmtree(source / "lapcli")  # what runs is what was installed
    entry = re.search(r'^ENTRYPOINT \["(\w+)"\]', "\n".join(lines), re.MULTILINE)[1]
    assert "train" in run(f"{entry} --help", work)
    run(f"{entry} train vit_digits --set train.steps=2 --set schedule.warmup_epochs=0 --runs-dir runs", work)
    assert (work / "runs/vit_digits/checkpoints/step-000002/model.safetensors").is_file()
