"""What goes over HTTP: requests, with what is allowed in them, answers and errors."""
