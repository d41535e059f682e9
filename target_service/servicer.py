"""The gRPC side of a target replica: streams are relayed to the engine process unopened."""

from specdec.replica.bridge.replica_service import ReplicaRole
from specdec.v1 import target_pb2

ROLE = ReplicaRole(
    name="target",
    grpc_name=target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name,
    stream_method="Verify",
    engine_entry="specdec.target_service.worker:run_engine",
    serves_tokenizer=True,
    engine_method="SetDrafters",
)
