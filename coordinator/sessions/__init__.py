"""One choice while it decodes, the request it belongs to, its client's stream, its statistics and its trace."""
