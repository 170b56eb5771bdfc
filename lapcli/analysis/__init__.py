"""`lap analyze`: measurements of the tokens of models and their figures; each has a file in `measurements`."""
