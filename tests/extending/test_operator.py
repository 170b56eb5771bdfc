"""A head operator from another package trains and is planned."""

from safetensors.torch import load_file

VIT = ["recipes/vit_digits.yaml", "--set", "train.steps=4", "--set", "schedule.warmup_epochs=0"]
DAMPED = ["--set", "model.laplacian_heads=0", "--set", "model.operators={damped: 2}"]


def test_a_vit_learns_its_shares(extended):
    extended("train", *VIT, *DAMPED, "--name", "damped")
    run = extended.runs / "damped"
    weights = load_file(run / "checkpoints" / "step-000004" / "model.safetensors")
    shares = weights["blocks.0.attn.operators.damped_share"]
    assert shares.shape == (2,)
    assert (shares - 0.25).abs().max() > 0


def test_the_plan_shows_its_letter_and_a_typo_its_name(extended):
    assert "A A D D" in extended("plan", *VIT, *DAMPED).stdout
    wrong = extended("plan", *VIT, "--set", "model.laplacian_heads=0", "--set", "model.operators={dampt: 2}", code=2)
    assert "did you mean damped?" in wrong.stderr
