"""Checks that a machine computes, trains and synchronises as `lap` expects, which CI without a GPU cannot show."""
