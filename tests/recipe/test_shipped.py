"""The list of shipped recipes is complete, and each starter recipe works unchanged."""

import pytest
from PIL import Image
from support import ROOT, run_main

from lapcli.recipe import find_recipe, load_recipe, recipe_to_dict
from lapcli.recipe.shipped import STARTERS, list_shipped, write_starter


def test_each_shipped_recipe_is_listed_with_a_summary_and_its_kind():
    shipped = {recipe.name: recipe for recipe in list_shipped()}
    folder = ROOT / "recipes"
    files = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")}
    assert set(shipped) == files
    for name, recipe in shipped.items():
        assert 10 < len(recipe.summary) < 160
        if not name.startswith(("sweeps/", "ladders/")):
            assert recipe.kind == load_recipe(recipe.path).objective


@pytest.mark.parametrize("name", ["vitb_imagenet_6L", "vitb_imagenet_6L.yaml", "recipes/vitb_imagenet_6L.yaml"])
def test_a_name_can_give_the_number_of_laplacian_heads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = find_recipe(name)
    assert path.stem == "vitb_imagenet_6L"  # the run's name
    expected = recipe_to_dict(load_recipe(find_recipe("vitb_imagenet")))
    expected["model"]["laplacian_heads"] = 6
    assert recipe_to_dict(load_recipe(path)) == expected
    assert load_recipe(path, ["model.laplacian_heads=3"]).model.laplacian_heads == 3


@pytest.mark.parametrize("job", list(STARTERS))
def test_a_starter_is_the_shipped_recipe_with_another_comment(job, tmp_path):
    written = write_starter(job, tmp_path / "new" / "folder")
    file, command = written[-1]
    original = load_recipe(ROOT / "recipes" / f"{STARTERS[job].recipe}.yaml")
    assert recipe_to_dict(load_recipe(file)) == recipe_to_dict(original)
    text = file.read_text()
    assert text.startswith("# ")
    assert f"# {command}" in text.splitlines()
    assert str(file) in command
    assert len([line for line in text.splitlines() if "#" in line]) >= 8  # the comments came along
    assert len(written) == (2 if job == "chat" else 1)


@pytest.mark.parametrize("has_split", [True, False])
def test_a_starter_is_fitted_to_a_folder_of_images(has_split, tmp_path, capsys):
    for part in ("train", "val") if has_split else ("",):
        for label in ("cat", "dog", "owl"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (80, 70), (number * 60, 0, 0)).save(folder / f"{number}.png")
    made, photos = tmp_path / "birds", str(tmp_path / "photos")
    code, out, err = run_main(capsys, "init", str(made), "--job", "images", "--data", photos)
    assert code == 0, err
    assert "birds.yaml" in out
    recipe = load_recipe(made / "birds.yaml")
    assert (recipe.model.classes, recipe.model.image, recipe.model.image % recipe.model.patch) == (3, 64, 0)
    assert recipe.data.train == photos
    assert recipe.data.validation == (None if has_split else 0.1)
    steps = ["--set", "train.steps=2", "--set", "schedule.warmup_epochs=0", "--runs-dir", str(tmp_path / "runs")]
    code, _, err = run_main(capsys, "train", str(made / "birds.yaml"), *steps)
    assert code == 0, err
    assert (tmp_path / "runs" / "birds" / "run.json").is_file()
