"""`specdec debug`: explains each step of one request."""
