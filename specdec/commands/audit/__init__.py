"""`specdec audit`: holds a service against its checkpoint, greedy token by token, sampled by chi-square."""
