"""Data: from a recipe's source to batches. Text today; `tokens.prepare_text` is the way in."""
