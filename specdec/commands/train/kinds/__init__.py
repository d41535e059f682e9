"""The kinds of drafters that can be trained, a file for each."""
