"""When a step is worth taking, and which nodes of the trees it verifies: pure functions and what they learn from."""
