"""How the services talk: server lifecycle, client channels, errors as statuses, the bridge to the engine.

server.py   one lifecycle for all services: health, reflection, metrics, signals, drain
channel.py  client channels with the same limits and keepalive
errors.py   errors to google.rpc.Status and back
abort.py    ending a call with an error
bridge/     gRPC streams to the engine process and back
"""
