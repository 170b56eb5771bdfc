"""The parts of self-supervised training: losses, masks, schedules, k-NN, and the warning of a collapse."""
