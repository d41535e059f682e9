"""From a checkpoint to a forward pass: files, loader, gate, probe, and the two ways to run it (ragged, fused)."""
