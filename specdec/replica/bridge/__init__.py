"""The bridge between a replica's servicer and its engine, two processes joined by one socket of encoded frames.

replica_service.py  a replica's life: server, engine, health, drain
engine_process.py   starting, watching and stopping the engine process
engine_child.py     the engine process's first code
stream_relay.py     relays gRPC streams to the engine and back, without parsing
frames.py           the engine's end of the bridge
"""
