"""`lap analyze`: measurements of the tokens of models and their figures; one file for each in `measurements`."""
