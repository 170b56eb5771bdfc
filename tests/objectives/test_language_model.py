"""Next-token prediction: parameter groups of the paper's recipe, and bits per byte worked by hand."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support import built

from lapcli.data.text.tokenizer import Tokenizer, train_tokenizer
from lapcli.data.text.tokens import TextData
from lapcli.data.token_store import PartWriter, TokenStore, TokenStream
from lapcli.objectives.language_model import LanguageModel
from lapcli.recipe import recipe_from_dict
from lapcli.recipe.schema import LanguageModelRecipe
from lapcli.runtime.devices import Device
from lapcli.runtime.ranks import World

torch.set_num_threads(2)

TEXT = "the cat sat on the mat; the dog sat on the log. " * 40


def recipe(**sections) -> LanguageModelRecipe:
    values = {
        "objective": "language_model",
        "model": {"layers": 1, "width": 32, "heads": 4, "context": 16, "laplacian_heads": 2},
        "tokenizer": {"vocab": 275},
        "data": {"train": "builtin"},
        "train": {"batch": 4, "micro_batch": 2, "steps": 10},
        **sections,
    }
    made = recipe_from_dict(values)
    assert isinstance(made, LanguageModelRecipe)
    return made


def groups_of(recipe, policy=None):
    objective = LanguageModel(recipe)
    objective.build(torch.device("meta"), policy)
    return objective.model, objective.parameter_groups()


class TestParameterGroups:
    def test_parameter_groups_of_the_paper(self) -> None:
        paper = recipe(
            model={"layers": 20, "width": 1280, "heads": 10, "laplacian_heads": 5}, tokenizer={"vocab": 65_536}
        )
        matrices, embedding, head = groups_of(paper)[1]
        assert (matrices.optimizer, embedding.optimizer, head.optimizer) == ("muon", "adamw", "adamw")
        assert matrices.lr == 0.02  # Muon's does not shrink with the width
        assert embedding.lr == pytest.approx(0.154919, abs=5e-7)
        assert head.lr == pytest.approx(0.00309839, abs=5e-9)
        assert len(matrices.parameters) == 120
        assert {p.ndim for p in matrices.parameters.values()} == {2}
        assert sum(p.numel() for p in matrices.parameters.values()) == 393_216_000
        assert (set(embedding.parameters), set(head.parameters)) == ({"embed.weight"}, {"head.weight"})
        for group in (embedding, head):
            assert group.options == {"betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}

    @pytest.mark.parametrize("bf16", [False, True])
    def test_muon_uses_the_run_precision_on_a_gpu_with_both(self, bf16: bool) -> None:
        made = recipe(train={"batch": 4, "micro_batch": 2, "steps": 10, "precision": "bf16" if bf16 else "float32"})
        matrices, *_ = groups_of(made, Device("H100", "cuda", None).policy(made.train.precision, False))[1]
        assert matrices.options["dtype"] is (torch.bfloat16 if bf16 else torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], vocab=275, max_chars=10_000, crop=10_000)


@pytest.fixture
def data(tokenizer: Tokenizer, tmp_path: Path) -> TextData:
    """Documents of the text, each preceded by the start token, in both streams."""

    def documents(count: int) -> TokenStream:
        return stream([[tokenizer.bos, *tokenizer.encode(TEXT[i * 7 : i * 7 + 50])] for i in range(count)], tmp_path)

    return TextData(tokenizer, documents(30), documents(9), "", "", {})


def stream(documents: list[list[int]], folder: Path) -> TokenStream:
    part = folder / str(len(documents))
    part.mkdir()
    writer = PartWriter(part, 275)
    for ids in documents:
        writer.append(ids)
        writer.end()
    writer.close()
    return TokenStream(TokenStore([part]), np.arange(len(documents)))


def alone() -> World:
    return World(0, 1, torch.device("cpu"))


def validate(objective: LanguageModel) -> dict[str, float]:
    return objective.validate(lambda: False)


def targets_of(data: TextData, sequences: int) -> list[int]:
    """Sequence i covers tokens 16 i to 16 i + 16: its targets are all except the first."""
    return data.validation.read(1, 16 * sequences).tolist()


class TestBitsPerByte:
    def test_bits_per_byte_of_a_uniform_model(self, data: TextData) -> None:
        """At the start every token costs log2(V) bits; the byte count is that of the text."""
        objective = built(LanguageModel, recipe(), data, alone())
        sequences = (len(data.validation) - 1) // 16
        ordinary = [t for t in targets_of(data, sequences) if t != data.tokenizer.bos]
        assert len(ordinary) < 16 * sequences  # some targets are start tokens, which have no bytes
        size = len(data.tokenizer.decode_bytes(ordinary))
        values = validate(objective)
        assert values["validation_loss"] == pytest.approx(math.log(275), rel=1e-6)
        assert values["validation_bits_per_byte"] == pytest.approx(math.log2(275) * len(ordinary) / size, rel=1e-6)

    def test_bits_per_byte_of_random_weights_token_by_token(self, data: TextData) -> None:
        objective = built(
            LanguageModel, recipe(validation={"tokens": 5 * 16 + 3}), data, alone()
        )  # five whole sequences
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in objective.model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        nats, bits, size = 0.0, 0.0, 0
        for sequence in range(5):
            ids = data.validation.read(16 * sequence, 17).tolist()
            log_p = objective.model(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
            for t, target in enumerate(ids[1:]):
                nats -= log_p[t, target].item()
                if target != data.tokenizer.bos:
                    bits -= log_p[t, target].item() / math.log(2)
                    size += len(data.tokenizer.decode_bytes([target]))
        values = validate(objective)
        assert values["validation_loss"] == pytest.approx(nats / 80, rel=1e-5)
        assert values["validation_bits_per_byte"] == pytest.approx(bits / size, rel=1e-5)


def test_parameter_groups_of_the_2026_nanochat_parts():
    """Only the learning rate of value embeddings, half of the embedding's, shrinks with width; gates are Muon's."""
    parts = dict.fromkeys(("residual_lambdas", "x0_lambdas", "value_embeddings"), True)
    own = recipe(model={"layers": 2, "width": 32, "heads": 4, "context": 16, **parts})
    groups = {group.name: group for group in groups_of(own)[1]}
    assert (groups["residual_lambdas"].lr, groups["x0_lambdas"].lr) == (0.005, 0.5)
    assert groups["x0_lambdas"].options["betas"] == (0.96, 0.95)
    assert groups["residual_lambdas"].options["weight_decay"] == 0.05
    assert groups["value embeddings"].lr == pytest.approx(groups["embedding"].lr / 2)
    assert "blocks.1.attn.value_gate.weight" in groups["matrices"].parameters
