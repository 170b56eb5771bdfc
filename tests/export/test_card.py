"""The model card: metadata for hubs, and warnings for readers."""

from export_support import gpt_run, vit_run
from huggingface_hub import ModelCard

from lapcli.export.export import export_run
from lapcli.objectives.weights import find_checkpoint
from lapcli.result_rows import add_rows, row


def card_of(run, to):
    folder = export_run(run, to, verified=False).folder
    return ModelCard.load(folder / "README.md")


def test_the_model_index_has_the_scores_of_these_weights(tmp_path):
    run = vit_run(tmp_path)
    known = {"unit": "fraction", "direction": "higher", "stderr": 0.025, "n": 360, "limit": 360}
    weights = find_checkpoint(run, "last").weights_sha256
    add_rows(run, [row("top1", "top1", 0.625, weights_sha256=weights, **known)])
    add_rows(run, [row("top1", "top1", 0.4321, weights_sha256="0" * 64, **known)])  # of another checkpoint
    card = card_of(run, "timm")
    assert card.data.model_name == "vit"
    assert (card.data.library_name, card.data.pipeline_tag) == ("timm", "image-classification")
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.metric_value) == ("top1", 0.625)
    assert (result.metric_args["n"], result.metric_args["stderr"]) == (360, 0.025)
    assert result.dataset_args["limit"] == 360
    assert "| top1 | top1 | 0.625 fraction | 0.025 | 360 | limit 360 |" in card.text
    assert "0.4321" not in card.text


def test_a_card_first_warns_of_plain_transformers(tmp_path):
    text = card_of(gpt_run(tmp_path), "hf").text
    assert text.index("Not a plain transformer") < text.index("## Load it")
    assert "trust_remote_code=True" in text
    assert "Not verified" in text
    plain = card_of(gpt_run(tmp_path, name="plain", laplacian_heads=0, chat=False), "hf").text
    assert "Not a plain transformer" not in plain
    assert "trust_remote_code" not in plain


def test_the_training_settings_on_the_card(tmp_path):
    run = gpt_run(tmp_path, chat=False)
    run.update(data="text.txt: 3 documents", data_sha256="e" * 64, device="1 x cpu")
    run.metrics.write_text('{"step": 1, "seconds_first_step": 1800.0}\n{"step": 2, "seconds": 1800.0}\n')
    card = card_of(run, "safetensors")
    for part in ("e" * 64, find_checkpoint(run, "last").weights_sha256, "1 x cpu", "1.00 hours", "torch"):
        assert part in card.text
    assert str(tmp_path) not in card.text  # where somebody keeps data is nobody's business
