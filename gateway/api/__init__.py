"""The HTTP interface: requests with their allowed values, answers and errors."""
