"""What is answered at which path: thin, between HTTP and translation."""
