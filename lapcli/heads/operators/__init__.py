"""Head operators, one file each; which heads of a layer have which is the head plan's to say."""

from lapcli.heads.operators.operator import OPERATORS, Operator, operator_with

__all__ = ["OPERATORS", "Operator", "operator_with"]
