"""Everything is in pyproject.toml but this: the recipes of the checkout's own folder are package data of the wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lapcli*"]), "lapcli.recipes", "lapcli.recipes.sweeps"],
    package_dir={"lapcli.recipes": "recipes"},
    package_data={"lapcli": ["py.typed"], "lapcli.recipes": ["*.yaml"], "lapcli.recipes.sweeps": ["*.yaml"]},
)
