"""Exports the weights of a run: one file per format (transformers, timm, safetensors), all by `export_run`."""
