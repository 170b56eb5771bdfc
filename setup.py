"""Everything is in pyproject.toml but this: data files of the wheel, and the recipes of the checkout's own folder."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["lapcli*"]), "lapcli.recipes", "lapcli.recipes.sweeps", "lapcli.recipes.ladders"],
    package_dir={"lapcli.recipes": "recipes"},
    package_data={
        "lapcli": ["py.typed"],
        "lapcli.export": ["*.j2"],
        "lapcli.report": ["*.yaml", "*.j2", "*.css"],
        "lapcli.recipes": ["*.yaml"],
        "lapcli.recipes.sweeps": ["*.yaml"],
        "lapcli.recipes.ladders": ["*.yaml"],
    },
)
