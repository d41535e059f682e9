"""`specdec audit`: compares a service with its checkpoint, greedy answers by token, sampled ones by chi-square."""
