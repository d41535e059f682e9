"""A supervisor starts several coordinator processes behind one port and keeps them running."""
