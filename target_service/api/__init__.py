"""A target whose model is behind an OpenAI-compatible endpoint. It needs neither torch nor llguidance."""
