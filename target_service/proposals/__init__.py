"""Where proposals come from: drafts elsewhere, and one of the target's own."""
