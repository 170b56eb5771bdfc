"""The plan of next-token prediction with a GPT."""

from typing import Any

import torch

from lapcli.data.text.tokens import describe_source
from lapcli.heads.plan import HeadPlan
from lapcli.models import compiling
from lapcli.models.chunked_loss import softcapped_cross_entropy
from lapcli.models.gpt import GPT
from lapcli.objectives.language_model import gpt_config, parameter_groups
from lapcli.planning.download import text_download
from lapcli.planning.kind import with_layers
from lapcli.planning.plan import LanguagePlan
from lapcli.planning.sketch import Sketch
from lapcli.recipe.schema import GPTRecipe, LanguageModelRecipe


class Language:
    multiple = 1
    keeps_best = False

    def __init__(self, recipe: LanguageModelRecipe) -> None:
        self._recipe = recipe

    @property
    def head_plan(self) -> HeadPlan:
        return self._recipe.model.head_plan()

    @property
    def steps(self) -> int | None:
        return self._recipe.train.steps

    def sketch(self, device: torch.device, bf16: bool, layers: int | None = None, compiled: bool = False) -> Sketch:
        return gpt_sketch(with_layers(self._recipe, layers), device, bf16, compiled)

    def download(self) -> tuple[int | None, str]:
        return text_download(self._recipe.data)

    def plan(self, shared: dict[str, Any]) -> LanguagePlan:
        recipe = self._recipe
        tokens = recipe.train.batch * recipe.model.context
        return LanguagePlan(
            **shared,
            tokens_per_step=tokens,
            tokens=None if self.steps is None else self.steps * tokens,
            flops_per_token=shared["flops_per_step"] // tokens,
            data=describe_source(recipe.data, recipe.tokenizer),
        )


def gpt_sketch(recipe: GPTRecipe, device: torch.device, bf16: bool, compiled: bool) -> Sketch:
    config = gpt_config(recipe)
    with device:
        model = GPT(config)
    if bf16:
        model.use_bf16()
    hidden = compiling.compiled(model.hidden) if compiled else model.hidden

    def forward(examples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens_BT = torch.zeros(examples, config.context, dtype=torch.long, device=device)
        return hidden(tokens_BT).flatten(0, 1), torch.zeros_like(tokens_BT).flatten()

    def loss(output: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return softcapped_cross_entropy(output[0], model.head.weight, output[1], config.softcap, compiled=compiled)

    return Sketch(model, parameter_groups(recipe, model), forward, loss)
