"""What happened in each step of a request, explained, and as a page."""
