"""vLLM's side of its hook for proposers, played without vLLM."""
