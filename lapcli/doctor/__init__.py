"""Checks that a machine computes, trains and synchronises as `lap` expects: what CI without a GPU cannot show."""
