"""A target or draft replica as two processes, whatever its role.

bridge/  the servicer (gRPC, asyncio), and the socket that joins it to the engine process
worker/  the engine process: sessions, and the loop of poll, step and send
"""
