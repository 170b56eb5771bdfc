"""What this package adds to lap. It is imported when lap finds an unknown name or lists names."""

from lap_example.damped import Damped
from lap_example.lion import Lion
from lap_example.masked_autoencoder import AutoencoderRecipe
from lap_example.spread import Spread
from lap_example.sums import SumsBenchmark, SumsText
from lapcli.runtime.plugins import Extensions


def register(extensions: Extensions) -> None:
    extensions.add("objective", AutoencoderRecipe)
    extensions.add("analysis", Spread)
    extensions.add("operator", Damped)
    extensions.add("optimizer", Lion())
    extensions.add("data source", SumsText())
    extensions.add("benchmark", SumsBenchmark())
