"""Grids of runs: which cells there are, what has become of them, and training those that are left."""
