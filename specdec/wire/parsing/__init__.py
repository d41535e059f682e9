"""Messages of peers: what parsing them costs, and what does not parse."""
