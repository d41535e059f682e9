"""The message types of a target's stream."""

from __future__ import annotations

from specdec.replica.worker.role import Wire
from specdec.v1 import target_pb2

WIRE = Wire(target_pb2.VerifyRequest, target_pb2.VerifyResponse, target_pb2.TargetResult, "verify session", "decode")
