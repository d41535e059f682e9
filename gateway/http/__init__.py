"""HTTP: connections, bodies, event streams, and the steps common to all requests."""
