"""Measures of models and their tokens that training, evaluation and analysis share; they import none of these."""
