"""What a session's drafts offered, as a tree; the walk through it; and both modes of verification on one screen."""
