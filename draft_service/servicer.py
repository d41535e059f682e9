"""The gRPC side of a draft replica: streams are relayed to the engine process unopened."""

from specdec.replica.bridge.replica_service import ReplicaRole
from specdec.v1 import draft_pb2

ROLE = ReplicaRole(
    name="draft",
    grpc_name=draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name,
    stream_method="Draft",
    engine_entry="specdec.draft_service.worker:run_engine",
    serves_tokenizer=False,
)
