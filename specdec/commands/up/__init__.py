"""The services as processes of this machine: what `up` and `demo` start, on which cores and devices, and their logs."""
