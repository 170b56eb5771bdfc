"""The parts of self-supervised training: targets, losses, masks, rates, and the watch for a collapse."""
