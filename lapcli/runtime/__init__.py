"""The bottom layer, which every other package may use: files, console, progress, errors, devices, ranks and
collectives, launch."""

__version__ = "0.2.0"
