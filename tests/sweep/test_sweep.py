"""Sweeps as files and as options: what they make, and what is wrong with them, all at once."""

from functools import partial

import pytest
from support import ROOT, run_main
from sweep_support import train_cells, write_recipe
from typer.main import get_command

from lapcli.cli import app
from lapcli.commands.sweep import parse_command
from lapcli.recipe import OBJECTIVES, RecipeError, recipe_to_dict
from lapcli.recipe.sweep import load_sweep
from lapcli.runs import read_run
from lapcli.runtime.errors import UsageError
from lapcli.same_recipe import leaves
from lapcli.sweep.sweep import known_cells, sweep_from_file, sweep_from_options

HEADS = "model.laplacian_heads"


PARSE = partial(parse_command, get_command(app))


def read(path, text, *options, **changes):
    path.write_text(text)
    loaded = load_sweep(path)
    assert loaded is not None
    sweep = sweep_from_file(loaded, options, **changes)
    sweep.check(PARSE)
    return sweep


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path)
    return tmp_path


def problems(folder, text, *options):
    with pytest.raises(RecipeError) as caught:
        read(folder / "s.yaml", text, *options)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_a_file_and_the_same_options_make_the_same_cells(folder):
    text = f"cells:\n  - recipe: tiny.yaml\n    over: {{{HEADS}: [0, 'linear(0, 4)'], seed: [0, 1]}}\n"
    from_file = read(folder / "s.yaml", text, "train.steps=3").grids[0].cells()
    over = {HEADS: [0, "linear(0, 4)"], "seed": [0, 1]}
    from_options = sweep_from_options(folder / "tiny.yaml", over, [], ["train.steps=3"]).grids[0].cells()
    assert [cell.name for cell in from_file] == [cell.name for cell in from_options]
    assert [cell.recipe_sha256 for cell in from_file] == [cell.recipe_sha256 for cell in from_options]
    assert [cell.name for cell in from_file][:3] == ["tiny-0L-seed0", "tiny-0L-seed1", "tiny-linear_0_4L-seed0"]
    assert {cell.loaded.train.steps for cell in from_file} == {3}
    assert [cell.loaded.seed for cell in from_file] == [0, 1, 0, 1]


def test_every_problem_of_a_file_at_once_with_its_line(folder):
    text = f"""\
cells:
  - recipe: tiny.yaml
    ovr: {{seed: [0]}}
    over:
      {HEADS}: [0, 5]
      optimizer.lrr: [1]
      seed: 3
    then: eval --tasks bpb
reports: --format html
"""
    found = problems(folder, text)
    assert found == [
        "s.yaml:3  cells[0].ovr: unknown key; did you mean `over`?",
        "s.yaml:7  cells[0].over.seed: expected a list, got 3",
        "s.yaml:9  reports: unknown key; did you mean `report`?",
    ]
    fixed = (
        text.replace("    ovr: {seed: [0]}\n", "").replace("seed: 3", "seed: [3]").replace("reports: --format html", "")
    )
    heads, rate = problems(folder, fixed)
    assert heads.startswith(f"s.yaml:4  {HEADS}: layer 0 has 4 heads, so 0 to 4 can be Laplacian, got 5")
    assert rate == "s.yaml:5  optimizer.lrr: unknown key; did you mean `lr`?"


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ("over: {seed: []}", "s.yaml:3  cells[0].over.seed: expected a list of at least 1 items, got []"),
        ("over: {seed: [1, 2, 1.0]}\n    set: {seed: 3}", "s.yaml:3  cells[0].over: seed is also in set; keep one"),
        ("over: {seed: [1, 1]}", "s.yaml:3  cells[0].over.seed: has 1 twice"),
        ("over: {optimizer: {lr: [1]}}", 's.yaml:3  cells[0].over.optimizer: expected a list, got {"lr": [1]}'),
        ("then: train tiny.yaml", "s.yaml:3  then: expected a command among eval, analyze, sft, in 'train tiny.yaml'"),
        ("then: [eval --taskss bpb]", "s.yaml:3  then: No such option: --taskss"),
        ("then: analyze everything", "s.yaml:3  then: expected one of"),
        ("then: 'eval --tasks \"bpb'", "s.yaml:3  then: quotes do not match"),
        ("then: sft nowhere.yaml", "s.yaml:3  then: 1 error in nowhere.yaml"),
        ("over: {seed: [1]}\nreport: --rows nosuchkey", "s.yaml:4  report: --rows: no recipe of these runs has a key"),
        ("over: {seed: [1]}\nreport: --rows seed", "s.yaml:4  report: --rows: tables are over seeds"),
        ("over: {seed: [1]}\nreport: --paper table1 --format html", "s.yaml:4  report: the html page has all three"),
        (
            "search: {over: {optimizer.lr: [0.1]}, keep: {seed: 1}, by: validation_loss, best: lowest}\n"
            "    over: {seed: [1]}",
            "s.yaml:3  cells[0].search: seed is in keep and also in another over or set; keep one",
        ),
        (
            "search: {over: {optimizer.lr: [0.1]}, by: validation_los, best: lowest}",
            's.yaml:3  search.by: "validation_los" is not a validation metric of this recipe; use one of',
        ),
    ],
)
def test_a_wrong_group(folder, group, said):
    found = problems(folder, f"cells:\n  - recipe: tiny.yaml\n    {group}\n")
    assert any(line.startswith(said) for line in found), found


def test_tasks_that_do_not_fit_the_runs(folder):
    text = f"cells:\n  - recipe: {ROOT}/recipes/vit_digits.yaml\n    then: eval --tasks top1,top9\n"
    (line,) = problems(folder, text)
    assert "no task 'top9' for a run of classification" in line


def test_a_recipe_that_is_not_there_and_one_with_stages(folder):
    (line,) = problems(folder, "cells:\n  - recipe: tny.yaml\n")
    assert line == "tny.yaml  does not exist; did you mean tiny.yaml?"
    (line,) = problems(folder, f"cells:\n  - recipe: {ROOT}/recipes/chat_quickstart.yaml\n")
    assert "put it into `then`" in line


def test_two_cells_of_one_name_are_refused_and_equal_ones_are_one(folder):
    group = "  - recipe: tiny.yaml\n    set: {train.steps: STEPS}\n    over: {seed: [0]}\n"
    (line,) = problems(folder, "cells:\n" + group.replace("STEPS", "3") + group.replace("STEPS", "4"))
    assert "two cells would both be the run tiny-seed0" in line
    same = read(folder / "s.yaml", "cells:\n" + 2 * group.replace("STEPS", "3"))
    assert [cell.name for cell, _ in known_cells(same, folder / "runs")] == ["tiny-seed0"]


def test_a_key_that_is_varied_and_set(folder):
    with pytest.raises(UsageError, match="seed is varied by the sweep and also given by --set"):
        sweep_from_options(folder / "tiny.yaml", {"seed": [0, 1]}, [], ["seed=3"])


def test_options_of_the_command(folder, capsys):
    for words, said in (
        (["tiny.yaml"], "give --over, such as"),
        (["tiny.yaml", "--over", "seed=0,0"], "--over seed has 0 twice"),
        (["tiny.yaml", "--over", "sed=0,1"], "--over  sed: unknown key; did you mean `seed`?"),
        (["tiny.yaml", "--over", f"{HEADS}=0,[1,2,3]"], "a list needs one number for each of the 2 layers, got 3"),
        (["tiny.yaml", "--over", "seed=0,1", "--then", "evil"], "--then  then: expected a command among"),
        (["tiny.yaml", "--over", "seed=0,1", "--only", "x*", "--dry-run"], "no cell is called x*"),
        (["tiny.yaml", "--over", "seed=0,1", "--slurm", "--json"], "--slurm prints a script"),
        (["tiny.yaml", "--over", "seed=0,1", "--no-search"], "--no-search is for sweep files"),
    ):
        code, out, err = run_main(capsys, "sweep", *words)
        assert (code, out) == (2, ""), err
        assert said in err
        assert "Traceback" not in err
    (folder / "s.yaml").write_text("cells: [{recipe: tiny.yaml}]")
    code, _, err = run_main(capsys, "sweep", "s.yaml", "--over", "seed=0,1")
    assert (code, "has its own grid" in err) == (2, True)


@pytest.mark.slow
def test_the_dry_run_prints_cells_costs_and_their_sum(folder, capsys):
    """Each cell's cost is that of its own plan."""
    from lapcli.planning import plan_training
    from lapcli.recipe import load_recipe

    flops = plan_training(load_recipe(folder / "tiny.yaml")).flops
    assert flops
    over = ["--over", f"{HEADS}=0,[1,3]", "--over", "seed=0,1"]
    code, out, err = run_main(capsys, "sweep", "tiny.yaml", *over, "--dry-run")
    assert code == 0, err
    lines = [line.split() for line in out.splitlines()]
    assert [line[:4] for line in lines[1:5]] == [
        [name, "new", "10", f"{flops:.3e}"]
        for name in ("tiny-0L-seed0", "tiny-0L-seed1", "tiny-1_3L-seed0", "tiny-1_3L-seed1")
    ]
    assert lines[5] == ["in", "all", f"{4 * flops:.3e}", f"{4 * flops:.3e}"]
    assert out.splitlines()[-1] == "4 cells, 4 to do"
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_the_dry_run_for_the_papers_machine(tmp_path, capsys):
    """The hours of a cell are those of `lap plan`, and the sum counts every cell."""
    import json

    from lapcli.planning import plan_training
    from lapcli.recipe import load_recipe
    from lapcli.runtime.devices import GPUS

    recipe = ROOT / "recipes/gpt561m.yaml"
    words = [str(recipe), "--over", f"{HEADS}=0,5,10", "--over", "seed=0,1", "--runs-dir", str(tmp_path)]
    code, out, err = run_main(capsys, "sweep", *words, "--dry-run", "--gpu", "l40", "--gpus", "4", "--json")
    assert code == 0, err
    told = json.loads(out)
    plan = plan_training(load_recipe(recipe), 4, GPUS["l40"])
    assert [cell["hours"] for cell in told["cells"]] == [plan.hours] * 6
    assert told["hours"] == pytest.approx(6 * plan.hours)
    assert told["devices"] == f"4 x L40 at {plan.mfu:.0%} of the peak"


def test_what_is_left_of_a_sweep_leaves_out_finished_cells(folder, capsys):
    import json

    runs = folder / "runs"
    words = ["tiny.yaml", "--over", "seed=0,1", "--runs-dir", str(runs), "--gpu", "l40", "--dry-run", "--json"]
    code, out, err = run_main(capsys, "sweep", *words)
    assert code == 0, err
    before = json.loads(out)
    assert before["hours"] == pytest.approx(2 * before["cells"][0]["hours"])
    train_cells(sweep_from_options(folder / "tiny.yaml", {"seed": [0]}, [], []).grids[0].cells(), runs)
    _, out, _ = run_main(capsys, "sweep", *words)
    after = json.loads(out)
    assert [cell["hours"] for cell in after["cells"]] == [0, before["cells"][0]["hours"]]
    assert after["hours"] == pytest.approx(before["hours"] / 2)


@pytest.mark.parametrize(("nproc", "gpus"), [([], 1), (["--nproc", "4"], 4)])
def test_a_slurm_script_asks_for_a_gpu_for_each_process(folder, capsys, nproc, gpus):
    code, out, err = run_main(capsys, "sweep", "tiny.yaml", "--over", "seed=0,1", *nproc, "--slurm")
    assert code == 0, err
    assert f"#SBATCH --gpus-per-node={gpus}\n" in out


SEARCH = """\
cells:
  - recipe: tiny.yaml
    search:
      over: {optimizer.lr: [LRS]}
      set: {model.laplacian_heads: 0, train.steps: 4}
      by: validation_loss
      best: lowest
    over: {model.laplacian_heads: [4], seed: [0, 1]}
"""


def test_a_search_decides_what_the_grid_is_trained_with(folder, capsys):
    """Without a process: what is finished is not trained again, and here everything is."""
    import json

    runs = folder / "runs"
    sweep = read(folder / "s.yaml", SEARCH.replace("LRS", "1e-7, 0.05, 1e-6"))
    before = known_cells(sweep, runs)
    assert [(cell.name, waits) for cell, waits in before] == [
        ("tiny-search-lr1e-07", False),
        ("tiny-search-lr0.05", False),
        ("tiny-search-lr1e-06", False),
        ("tiny-4L-seed0", True),
        ("tiny-4L-seed1", True),
    ]
    code, _, err = run_main(capsys, "sweep", "s.yaml", "--only", "*-4L-*")
    assert code == 2
    assert "wait for their search" in err
    train_cells([cell for cell, waits in before if not waits], runs)
    ends = {
        rate: json.loads((runs / f"tiny-search-lr{rate}/summary.json").read_text())["end"]["validation_loss"]
        for rate in ("1e-07", "0.05", "1e-06")
    }
    told = json.loads((runs / "tiny-search-lr0.05/summary.json").read_text())["end"]
    assert set(told) == set(OBJECTIVES["language_model"].metrics)
    assert min(ends, key=ends.get) == "0.05"  # two of them cannot learn in four steps
    after = [cell for cell, waits in known_cells(sweep, runs) if not cell.is_search and not waits]
    assert [cell.name for cell in after] == ["tiny-lr0.05-4L-seed0", "tiny-lr0.05-4L-seed1"]
    assert {(cell.loaded.optimizer.lr, cell.loaded.train.steps) for cell in after} == {(0.05, 10)}
    train_cells(after, runs)
    code, out, err = run_main(capsys, "sweep", "s.yaml", "--json")
    assert code == 0, err
    assert f"optimizer.lr=0.05: validation_loss {ends['0.05']:.4f}, the best of 3" in err
    told = json.loads(out)
    assert [cell["state"] for cell in told["cells"]] == ["finished"] * 5
    assert told["chosen"] == {"tiny-search-lr0.05": {"optimizer.lr": 0.05}}
    # The runs of the search are marked, and reports take them for no results.
    code, out, err = run_main(capsys, "report", "--columns", "validation_loss", "--format", "json")
    assert code == 0, err
    (table,) = json.loads(out)
    assert [(row["row"], row["cells"]["validation_loss"]["n"]) for row in table["rows"]] == [("4", 2)]
    assert "3 runs of a search are not results and are not shown" in err
    code, out, err = run_main(capsys, "report", "tiny-search-lr0.05", "--format", "json")
    (table,) = json.loads(out)
    assert table["title"].startswith("language model, search · ")


def test_a_recipe_is_loaded_once_a_cell(folder, monkeypatch, capsys):
    """By the checks, the table of costs and what is refused together; with a search also for each choice of it."""
    from lapcli.sweep import grid

    loads, make_loader = [], grid.recipe_loader

    def counting_loader(path):
        load = make_loader(path)
        return lambda overrides, seed: loads.append(tuple(overrides)) or load(overrides, seed)

    monkeypatch.setattr(grid, "recipe_loader", counting_loader)
    (folder / "s.yaml").write_text(SEARCH.replace("LRS", "0.01, 0.05"))
    code, _, err = run_main(capsys, "sweep", "s.yaml", "--dry-run")
    assert code == 0, err
    # Two of the search, the grid's own recipe, its two cells, and the first seed of its cells by two choices.
    assert len(loads) == len(set(loads)) == 2 + 1 + 2 + 2


CHOICES = """\
cells:
  - recipe: tiny.yaml
    set: {schedule.warmup: 0.4}
    search:
      over: {schedule.warmdown: [0.1, 0.7, 0.8], optimizer.lr: [0.01, 0.02]}
      set: {schedule.warmup: 0.0}
      by: validation_loss
      best: lowest
    over: {model.laplacian_heads: [0, 4], seed: [0, 1]}
"""


def test_a_choice_that_leads_to_a_refused_cell_is_refused_before_the_search(folder):
    """The recipe's own values are fine and so are those of the search, but not every grid that it can lead to."""
    first, second = problems(folder, CHOICES)
    assert "warmup 0.4 and warmdown 0.7 are more than the whole run" in first
    assert first.endswith("if the search chooses schedule.warmdown=0.7 optimizer.lr=0.01 or 1 other")
    assert "warmdown 0.8" in second
    read(folder / "s.yaml", CHOICES.replace(", 0.7, 0.8", ""))


def test_what_the_search_keeps_is_in_the_grid_that_follows_it_and_nowhere_else(folder):
    text = CHOICES.replace("    set: {schedule.warmup: 0.4}\n", "").replace("      set:", "      keep:")
    sweep = read(folder / "s.yaml", text.replace("0.0}", "0.1}"))
    (grid,) = sweep.grids
    chosen = grid.cells({"schedule.warmdown": 0.8, "optimizer.lr": 0.02})
    assert {cell.loaded.schedule.warmup for cell in (*grid.search_cells(), *grid.cells(), *chosen)} == {0.1}
    assert chosen[0].name == "tiny-warmup0.1-warmdown0.8-0L-seed0"  # not the run that --no-search would train
    (plain,) = read(folder / "s.yaml", text.replace("0.0}", "0.1}"), search=False).grids
    assert {cell.loaded.schedule.warmup for cell in plain.cells()} == {0.0}
    (given,) = read(folder / "s.yaml", text.replace("0.0}", "0.1}"), "schedule.warmup=0.05").grids
    assert {cell.loaded.schedule.warmup for cell in (*given.search_cells(), *given.cells())} == {0.05}
    assert given.cells()[0].name == "tiny-0L-seed0"


def test_a_name_that_a_choice_leads_to_and_that_is_taken_is_refused_before_the_search(folder, capsys):
    """Found after it, that would have cost the whole search."""
    runs = folder / "runs"
    text = SEARCH.replace("LRS", "0.01, 0.05")
    over = {"optimizer.lr": [0.05], HEADS: [4], "seed": [1]}
    train_cells(sweep_from_options(folder / "tiny.yaml", over, [], ["train.steps=3"]).grids[0].cells(), runs)
    assert (runs / "tiny-lr0.05-4L-seed1").is_dir()
    (folder / "s.yaml").write_text(text)
    code, out, err = run_main(capsys, "sweep", "s.yaml")
    assert (code, out) == (2, "")
    assert "tiny-lr0.05-4L-seed1: train.steps 3 in the run, 10 now" in err
    assert [path.name for path in runs.iterdir()] == ["tiny-lr0.05-4L-seed1"]


def test_two_groups_that_meet_in_a_name_by_a_choice_are_refused(folder):
    other = "  - {recipe: tiny.yaml, set: {train.steps: 3}, over: {optimizer.lr: [0.05], model.laplacian_heads: [4]}}\n"
    text = SEARCH.replace("LRS", "0.01, 0.05").replace(", seed: [0, 1]", "")
    (line,) = problems(folder, text + other)
    assert "two cells would both be the run tiny-lr0.05-4L" in line
    assert line.endswith("if the search chooses optimizer.lr=0.05")


def test_a_choice_that_is_the_recipes_own_shares_its_runs_with_no_search(folder):
    runs = folder / "runs"
    text = SEARCH.replace("LRS", "1e-7, 0.02")  # the recipe's own is Muon's default
    train_cells(read(folder / "s.yaml", text).grids[0].search_cells(), runs)
    searched = [cell for cell, _ in known_cells(read(folder / "s.yaml", text), runs) if not cell.is_search]
    plain = [cell for cell, _ in known_cells(read(folder / "s.yaml", text, search=False), runs)]
    assert [(c.name, c.recipe_sha256) for c in searched] == [(c.name, c.recipe_sha256) for c in plain]


def test_a_diverged_run_is_tried_and_a_failed_one_is_not(folder):
    runs = folder / "runs"
    sweep = read(folder / "s.yaml", SEARCH.replace("LRS", "0.01, 0.05"))
    cells = sweep.grids[0].search_cells()
    train_cells(cells, runs)
    run = read_run(runs / cells[1].name)
    run.update(status="failed", failure="the disk is full")
    assert any(waits for _, waits in known_cells(sweep, runs))
    run.update(status="failed", failure="the loss is nan", diverged=True)
    assert not any(waits for _, waits in known_cells(sweep, runs))
    assert {cell.loaded.optimizer.lr for cell, _ in known_cells(sweep, runs) if not cell.is_search} == {0.01}


@pytest.mark.parametrize(
    ("name", "search", "grid"),
    [
        ("cifar10", 15, 54),
        ("cifar100", 15, 54),
        ("imagenet", 15, 54),
        ("language", 0, 14),
        ("dino", 0, 5),
        ("laptop", 0, 18),
        ("rivals_laptop", 0, 48),
        ("regime_laptop", 0, 72),
        ("rivals_cifar10", 0, 24),
        ("rivals_novels", 0, 24),
    ],
)
def test_the_shipped_sweeps(name, search, grid, tmp_path):
    """The paper's numbers of runs: 6 head counts x 3 drop paths x 3 seeds, 5 rates x 3 decays, 7 GPTs, 5 ViT-S."""
    loaded = load_sweep(ROOT / f"recipes/sweeps/{name}.yaml")
    assert loaded is not None
    sweep = sweep_from_file(loaded, [])
    searched = [cell for one in sweep.grids for cell in one.search_cells()]
    cells = [cell for one in sweep.grids for cell in one.cells()]
    assert (len(searched), len(cells)) == (search, grid)
    assert len({cell.name for cell in (*searched, *cells)}) == search + grid
    for cell in searched:
        assert (cell.loaded.model.laplacian_heads, cell.loaded.seed) == (0, 0)
        assert 0 < cell.loaded.data.validation < 1  # of the training images: the test images decide nothing
    sweep_without_reports = type(sweep)(sweep.name, sweep.grids)
    sweep_without_reports.check(PARSE)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "imagenet"])
def test_the_grid_is_trained_as_it_was_searched(name):
    """Whatever is chosen, a cell differs from the best run of the search in what only the one or the other may have."""
    loaded = load_sweep(ROOT / f"recipes/sweeps/{name}.yaml")
    (grid,) = sweep_from_file(loaded, []).grids
    allowed = {*grid.search.set, *grid.over}
    choices = grid.choices()
    assert len(choices) == 15
    for choice, searched in zip(choices, grid.search_cells(), strict=True):
        assert dict(searched.values) == choice
        own = dict(leaves(recipe_to_dict(searched.loaded)))
        first = grid.cells(choice, lambda name: name.endswith("-0L-drop_path0.1-seed0"))
        assert len(first) == 1
        found = dict(leaves(recipe_to_dict(first[0].loaded)))
        assert {key for key in {**own, **found} if own.get(key) != found.get(key)} <= allowed


def test_without_the_search_the_grid_on_imagenet_has_the_papers_values():
    (grid,) = sweep_from_file(load_sweep(ROOT / "recipes/sweeps/imagenet.yaml"), [], search=False).grids
    for cell in grid.cells():
        assert cell.loaded.schedule.start_lr == 1e-3
        assert (cell.loaded.optimizer.lr, cell.loaded.optimizer.weight_decay) == (3e-3, 0.02)


def test_every_shipped_sweep_is_tested():
    names = {path.stem for path in (ROOT / "recipes/sweeps").glob("*.yaml")}
    assert names == {
        "cifar10",
        "cifar100",
        "imagenet",
        "language",
        "dino",
        "laptop",
        "rivals_laptop",
        "regime_laptop",
        "rivals_cifar10",
        "rivals_novels",
    }
