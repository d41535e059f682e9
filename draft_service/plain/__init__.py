"""A draft without a model: n-gram and other look-up drafters, or an endpoint. Needs neither torch nor llguidance."""
