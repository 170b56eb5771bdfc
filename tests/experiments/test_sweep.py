"""Sweeps as files and as options: their cells, faults, costs and choices."""

import json

import pytest
from support import ROOT, run_main
from sweep_support import sweep_of, train_cells, write_recipe

from lapcli.experiments.sweep import choose, known_cells
from lapcli.planning import plan_training
from lapcli.recipe import RecipeError, load_recipe
from lapcli.runs import read_run
from lapcli.runtime.devices import GPUS
from lapcli.runtime.errors import UsageError

HEADS = "model.laplacian_heads"
TUNE = """\
cells:
  - recipe: tiny.yaml
    tune:
      over: {optimizer.lr: [LRS]}
      set: {model.laplacian_heads: 0, train.steps: 4}
      by: validation_loss
    over: {model.laplacian_heads: [4], seed: [0, 1]}
"""
CHOICES = """\
cells:
  - recipe: tiny.yaml
    set: {schedule.warmup: 0.4}
    tune:
      over: {schedule.warmdown: [0.1, 0.7], optimizer.lr: [0.01, 0.02]}
      set: {schedule.warmup: 0.0}
      by: validation_loss
    over: {model.laplacian_heads: [0, 4], seed: [0, 1]}
"""


def read(folder, text, *options, **changes):
    (folder / "s.yaml").write_text(text)
    sweep = sweep_of(folder / "s.yaml", *options, **changes)
    sweep.check()
    return sweep


def names(cells):
    return [cell.name for cell in cells]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def test_a_file_and_equivalent_options_make_the_same_cells(folder):
    text = f"cells:\n  - recipe: tiny.yaml\n    over: {{{HEADS}: [0, 'linear(0, 4)'], seed: [0, 1]}}\n"
    from_file = read(folder, text, "train.steps=3").grids[0].cells()
    over = {HEADS: [0, "linear(0, 4)"], "seed": [0, 1]}
    from_options = sweep_of(folder / "tiny.yaml", "train.steps=3", over=over).grids[0].cells()
    assert names(from_file) == names(from_options)
    assert [cell.recipe_sha256 for cell in from_file] == [cell.recipe_sha256 for cell in from_options]
    assert names(from_file)[:3] == ["tiny-0L-seed0", "tiny-0L-seed1", "tiny-linear_0_4L-seed0"]
    assert {cell.loaded.train.steps for cell in from_file} == {3}
    assert [cell.loaded.seed for cell in from_file] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("group", "line", "key"),
    [
        ("ovr: {seed: [0]}", 3, "`over`"),
        ("over: {seed: 3}", 3, "cells[0].over.seed"),
        ("over: {seed: []}", 3, "cells[0].over.seed"),
        (f"over:\n      {HEADS}: [0, 5]", 4, HEADS),
        ("over:\n      seed: [1]\n      optimizer.lrr: [1]", 5, "`lr`"),
        ("over: {seed: [1, 2]}\n    set: {seed: 3}", 3, "seed"),
        ("tune: {over: {optimizer.lr: [0.1]}, keep: {seed: 1}, by: validation_loss}\n    over: {seed: [1]}", 4, "seed"),
        ("over: {seed: [1]}\n    tune: {over: {optimizer.lr: [0.1]}, by: validation_los}", 4, "validation_loss"),
        ("over: {seed: [1]}\nreports: --format html", 4, "`report`"),
    ],
)
def test_a_problem_names_its_line_and_key(folder, group, line, key):
    with pytest.raises(RecipeError) as caught:
        read(folder, f"cells:\n  - recipe: tiny.yaml\n    {group}\n")
    assert any(each.where.endswith(f"s.yaml:{line}") and key in str(each) for each in caught.value.problems)


def test_name_clashes_are_refused_and_equal_cells_are_merged(folder):
    group = "  - recipe: tiny.yaml\n    set: {train.steps: STEPS}\n    over: {seed: [0, 0]}\n"
    with pytest.raises(RecipeError, match="tiny-seed0"):
        read(folder, "cells:\n" + group.replace("STEPS", "3") + group.replace("STEPS", "4"))
    same = read(folder, "cells:\n" + 2 * group.replace("STEPS", "3"))
    assert names(cell for cell, _ in known_cells(same, folder / "runs")) == ["tiny-seed0"]


def test_too_many_cells_are_refused_before_any_is_made(folder):
    many = [*range(1000)]
    with pytest.raises(UsageError, match="1,000,000,000 runs"):
        sweep_of(folder / "tiny.yaml", over={"seed": many, "train.batch": many, "train.steps": many}).check()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tiny.yaml"], "--over"),
        (["tiny.yaml", "--over", "sed=0,1"], "`seed`"),
        (["tiny.yaml", "--over", "seed=0,1", "--set", "seed=3"], "seed"),
        (["tiny.yaml", "--over", "seed=0,1", "--then", "evil"], "eval, analyze, sft"),
        (["tiny.yaml", "--over", "seed=0,1", "--then", "eval --taskss bpb"], "--taskss"),
        (["tiny.yaml", "--over", "seed=0,1", "--then", "eval --tasks top1"], "bpb"),
        (["tiny.yaml", "--over", "seed=0,1", "--only", "x*", "--dry-run"], "x*"),
        (["tiny.yaml", "--over", "seed=0,1", "--slurm", "--json"], "--slurm"),
        (["tiny.yaml", "--over", "seed=0,1", "--no-tune"], "--no-tune"),
        (["s.yaml", "--over", "seed=0,1"], "--over"),
        (["s.yaml"], "s.yaml:2"),
    ],
)
def test_mistakes_of_the_command(folder, capsys, words, named):
    (folder / "s.yaml").write_text("cells: [{recipe: tiny.yaml}]\nreport: --colums x")
    code, out, err = run_main(capsys, "sweep", *words)
    assert (code, out) == (2, ""), err
    assert named in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_dry_run_counts_remaining_work_by_the_plan_of_each_cell(folder, capsys):
    runs = folder / "runs"
    words = ["tiny.yaml", "--over", f"{HEADS}=0,[1,3]", "--runs-dir", str(runs)]
    dry = ["--dry-run", "--gpu", "l40"]
    plan = plan_training(load_recipe(folder / "tiny.yaml"), 1, GPUS["l40"])
    code, out, err = run_main(capsys, "sweep", *words, *dry, "--json")
    assert code == 0, err
    before = json.loads(out)
    assert [(cell["cell"], cell["state"], cell["flops"], cell["hours_left"]) for cell in before["cells"]] == [
        (name, "new", plan.flops, plan.hours) for name in ("tiny-0L", "tiny-1_3L")
    ]
    assert not runs.exists()
    train_cells(sweep_of(folder / "tiny.yaml", over={HEADS: [0]}).grids[0].cells(), runs)
    after = json.loads(run_main(capsys, "sweep", *words, *dry, "--json")[1])
    assert [cell["hours_left"] for cell in after["cells"]] == [0, plan.hours]
    assert (after["hours_left"], after["flops_left"]) == (pytest.approx(before["hours"] / 2), plan.flops)
    code, out, _ = run_main(capsys, "sweep", *words, *dry)
    assert out.splitlines()[1].split()[:2] == ["tiny-0L", "finished"]


def test_tuning_sets_the_values_of_the_grid(folder, capsys):
    """No process is started: finished cells are not trained again, and here all are finished."""
    runs = folder / "runs"
    sweep = read(folder, TUNE.replace("LRS", "1e-7, 0.05, 1e-6"))
    before = known_cells(sweep, runs)
    assert [(cell.name, waits) for cell, waits in before] == [
        *((f"tiny-tune-lr{rate}", False) for rate in ("1e-07", "0.05", "1e-06")),
        *((f"tiny-4L-seed{seed}", True) for seed in (0, 1)),
    ]
    code, _, err = run_main(capsys, "sweep", "s.yaml", "--only", "*-4L-*")
    assert (code, "--only" in err) == (2, True)
    train_cells([cell for cell, waits in before if not waits], runs)
    after = [cell for cell, waits in known_cells(sweep, runs) if not cell.is_search and not waits]
    # Two of the rates cannot learn in four steps.
    assert names(after) == ["tiny-lr0.05-4L-seed0", "tiny-lr0.05-4L-seed1"]
    assert {(cell.loaded.optimizer.lr, cell.loaded.train.steps) for cell in after} == {(0.05, 10)}
    train_cells(after, runs)
    code, out, err = run_main(capsys, "sweep", "s.yaml", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert [cell["state"] for cell in told["cells"]] == ["finished"] * 5
    assert told["chosen"] == {"tiny-tune-lr0.05": {"optimizer.lr": 0.05}}
    # The tuning runs are marked and do not count as results.
    marked = [path.parent.name for path in runs.glob("*/sweep.json") if json.loads(path.read_text()).get("search")]
    assert sorted(marked) == ["tiny-tune-lr0.05", "tiny-tune-lr1e-06", "tiny-tune-lr1e-07"]


@pytest.mark.parametrize(("metric", "better"), [("validation_top1", max), ("validation_loss", min)])
def test_a_choice_follows_the_direction_of_its_metric(tmp_path, metric, better):
    recipe = ROOT / "recipes/vit_digits.yaml"
    short = ("train.steps=2", "train.epochs=null", "schedule.warmup_epochs=0", "validation.every=2", "data.workers=0")
    cells = sweep_of(recipe, *short, over={"seed": [0, 1, 2]}).grids[0].cells()
    train_cells(cells, tmp_path)
    ends = {c.name: json.loads((tmp_path / c.name / "summary.json").read_text())["end"][metric] for c in cells}
    assert choose(cells, metric, tmp_path)[0].name == better(ends, key=ends.get)


def test_kept_values_apply_only_to_the_following_grid(folder):
    text = CHOICES.replace("    set: {schedule.warmup: 0.4}\n", "").replace("      set:", "      keep:")
    text = text.replace("0.0}", "0.1}")
    (grid,) = read(folder, text).grids
    chosen = grid.cells({"schedule.warmdown": 0.7, "optimizer.lr": 0.02})
    assert {cell.loaded.schedule.warmup for cell in (*grid.tune_cells(), *grid.cells(), *chosen)} == {0.1}
    assert chosen[0].name == "tiny-warmup0.1-warmdown0.7-0L-seed0"  # not the run that --no-tune would train
    (plain,) = read(folder, text, tune=False).grids
    assert {cell.loaded.schedule.warmup for cell in plain.cells()} == {0.0}
    (given,) = read(folder, text, "schedule.warmup=0.05").grids
    assert {cell.loaded.schedule.warmup for cell in (*given.tune_cells(), *given.cells())} == {0.05}


def test_a_diverged_run_counts_as_tried_but_a_failed_run_does_not(folder):
    runs = folder / "runs"
    sweep = read(folder, TUNE.replace("LRS", "0.01, 0.05"))
    cells = sweep.grids[0].tune_cells()
    train_cells(cells, runs)
    run = read_run(runs / cells[1].name)
    run.update(status="failed", failure="the disk is full")
    assert any(waits for _, waits in known_cells(sweep, runs))
    run.update(status="failed", failure="the loss is nan", diverged=True)
    assert not any(waits for _, waits in known_cells(sweep, runs))
    assert {cell.loaded.optimizer.lr for cell, _ in known_cells(sweep, runs) if not cell.is_search} == {0.01}


#: The run counts of the paper: 6 head counts x 3 drop paths x 3 seeds, 5 rates x 3 decays, 7 GPTs, 5 ViT-S.
SHIPPED = {"cifar10": (15, 54), "cifar100": (15, 54), "imagenet": (15, 54), "language": (0, 14), "dino": (0, 5)}
SHIPPED |= {"laptop": (0, 18), "rivals_laptop": (0, 48), "regime_laptop": (0, 72)}
SHIPPED |= {"rivals_cifar10": (0, 24), "rivals_novels": (0, 24)}


@pytest.mark.parametrize(("name", "counts"), SHIPPED.items(), ids=SHIPPED)
def test_a_shipped_sweep(name, counts):
    sweep = sweep_of(ROOT / f"recipes/sweeps/{name}.yaml")
    sweep.check()
    tuned = [cell for grid in sweep.grids for cell in grid.tune_cells()]
    cells = [cell for grid in sweep.grids for cell in grid.cells()]
    assert (len(tuned), len(cells)) == counts
    assert len({cell.name for cell in (*tuned, *cells)}) == sum(counts)
    for cell in tuned:
        assert (cell.loaded.model.laplacian_heads, cell.loaded.seed) == (0, 0)
        assert 0 < cell.loaded.data.validation < 1  # of the training images: the test images decide nothing
