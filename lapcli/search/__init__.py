"""Search over head plans and other recipe keys: Optuna proposes parameters, and each trial is an ordinary run."""
