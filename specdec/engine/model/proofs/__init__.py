"""What is proved of a model at load beyond the lengths of the self-test."""
