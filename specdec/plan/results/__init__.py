"""What a plan consists of: figures, a values file, a page."""
