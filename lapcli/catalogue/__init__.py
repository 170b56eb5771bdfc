"""The runs of a folder together: what there is, how two of them differ, which is the best, and what can go."""
