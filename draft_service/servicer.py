"""The gRPC side of a draft replica: relays streams to the engine process without parsing them."""

from specdec.replica.bridge.replica_service import ReplicaRole
from specdec.v1 import draft_pb2

ROLE = ReplicaRole(
    name="draft",
    grpc_name=draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    stream_method="Draft",
    engine_entry="specdec.draft_service.worker:run_engine",
    serves_tokenizer=False,
)
