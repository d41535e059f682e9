"""A session's tree of proposals, the walk through it, and both modes of verification on one screen."""
