"""Weights out of a run: one file for a format (transformers, timm, safetensors, ONNX), all through `export_run`."""
