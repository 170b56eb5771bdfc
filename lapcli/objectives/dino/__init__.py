"""Parts of self-supervised training: losses, their compiled kernels, and monitoring by k-NN and signs of collapse."""
