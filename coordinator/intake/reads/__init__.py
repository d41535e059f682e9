"""How a request is received and parsed within bounds."""
