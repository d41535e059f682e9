"""Whether a service says what its model says: greedily token by token, and when sampling by chi-square."""
