"""A replica of either role as two processes.

bridge/  the servicer (gRPC, asyncio), and the socket that joins it to the engine process
worker/  the engine process: sessions, and the loop of poll, step and send
"""
