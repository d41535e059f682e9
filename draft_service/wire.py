"""The message types of a draft's stream."""

from __future__ import annotations

from specdec.replica.worker.role import Wire
from specdec.v1 import draft_pb2

WIRE = Wire(draft_pb2.DraftRequest, draft_pb2.DraftResponse, draft_pb2.DraftResult, "draft session", "draft")
