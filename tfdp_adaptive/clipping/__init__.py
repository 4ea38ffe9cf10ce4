"""Per-example gradients, clipped and summed: the only layer that sees private data."""
