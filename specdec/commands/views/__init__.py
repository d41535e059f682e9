"""What people see in the terminal: streams coloured by origin, and tables."""
