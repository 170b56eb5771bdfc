"""Measures of models and their tokens, shared by training, evaluation and analysis, none of which they import."""
