"""A draft without a model: drafters that look things up, or ask an endpoint. It needs neither torch nor llguidance."""
