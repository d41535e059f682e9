"""`specdec up` and `specdec demo`: the services as processes of this machine, their cores, devices and logs."""
