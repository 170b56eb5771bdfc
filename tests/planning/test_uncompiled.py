"""A process that has not imported torch's compiler plans without it, and can use it afterwards."""

import subprocess
import sys

from support import HANG, ROOT

PLAN = """
import sys
from pathlib import Path
import torch
from lapcli.planning import plan_training
from lapcli.planning.uncompiled import without_compiler
from lapcli.recipe import load_recipe

recipe = load_recipe(Path("recipes/quickstart.yaml"))
plan = plan_training(recipe)
assert "torch._dynamo" not in sys.modules, "the compiler was imported"

with without_compiler():
    torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    assert "torch._dynamo.eval_frame" not in sys.modules
    assert torch._dynamo.config.cache_size_limit > 0  # only the real one has it
assert "torch._dynamo.eval_frame" in sys.modules

optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
answer = torch.optim.Optimizer.add_param_group.__wrapped__.__dynamo_disable
assert answer._torchdynamo_disable, "the optimizer still remembers the stand-in's answer"
double = torch.compile(lambda x: 2 * x, backend="eager", fullgraph=True)
assert double(torch.ones(3)).tolist() == [2, 2, 2]
assert plan_training(recipe) == plan
"""


def test_planning_leaves_the_compiler_alone():
    subprocess.run([sys.executable, "-c", PLAN], cwd=ROOT, check=True, timeout=HANG)
