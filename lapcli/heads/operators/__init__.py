"""Head operators, one file each; the head plan assigns them to the heads of a layer."""

from lapcli.heads.operators.operator import OPERATORS, Operator, build_operator

__all__ = ["OPERATORS", "Operator", "build_operator"]
