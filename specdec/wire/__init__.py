"""What processes agree on: errors, channels, TLS, addresses, message sizes, sampling parameters and their limits."""
