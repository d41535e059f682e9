"""The message types of a target's stream."""

from __future__ import annotations

from specdec.v1 import target_pb2
from specdec.worker.role import Wire

WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.TargetResult, "verify session", "decode")
