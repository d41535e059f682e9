"""A service process: listening, health, metrics, TLS renewal, signals, drain. Start reading at `server.py`."""
