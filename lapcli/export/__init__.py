"""Exports the weights of a run: one file per format (transformers, timm, safetensors, ONNX), all by `export_run`."""
