"""Where the results of slots lie."""

from pathlib import Path

EARLIER = Path("bench/results/gpu-slot.json")
"""What the next slot goes on from."""
DRY = Path("dist/gpu-slot-dry.json")
"""Of a slot without a GPU, which leaves nothing done."""
