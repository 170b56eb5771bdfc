"""Head operators, one file each; the head plan assigns them to the heads of a layer."""

from lapcli.heads.operators.operator import OPERATORS, Operator, operator_with

__all__ = ["OPERATORS", "Operator", "operator_with"]
