"""Searches over head plans and any other key of a recipe: proposals by Optuna, trials as ordinary runs."""
