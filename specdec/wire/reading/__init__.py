"""Messages of peers: what one would cost to parse, and what is made of one that does not parse."""
