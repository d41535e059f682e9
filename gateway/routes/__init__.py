"""Routes: a thin layer between HTTP and translation."""
