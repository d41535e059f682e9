"""The ranks of an engine that is split over processes, on one machine or on several.

Rank 0 is the engine process. It schedules and samples, and sends each step to the other ranks, which follow
(`specdec.engine.leading_runner`). A machine is a node; node 0 leads and has the first ranks.

On one node rank 0 starts the other ranks as children (`leading.py`, `rank_child.py`). Steps go through Unix sockets,
and ranks meet in a file without a name.

On several nodes `specdec serve target` of node 1 and up runs `node_service.py` in place of an engine:

1. The node calls the leader's master_port (`gate.py`) until it answers, and says HELLO: version, settings, digests
   of its weights and config. The leader answers REFUSED with one reason, or WELCOME with the group's token and the
   port of its store.
2. The node starts its ranks. Each calls the leader itself and says HELLO with the token; steps come over that
   connection.
3. The ranks meet at the store and load. Each says LOADED with its numerics, which must be the leader's, else the
   leader says REFUSED to the nodes and ends. It says READY to them, whose health is then SERVING.
4. Leader and nodes send each other a BEAT every second.

Invariants: a connection is used by one thread at a time, as TLS of Python's allows no two. Only ranks of a welcomed
node know the token. The gate closes when the group is complete, so no node joins twice or late. A group never repairs
itself: whatever is lost, all nodes exit with 1 and are started anew, so that no two ranks can differ in what they
have computed.

What can fail: a node that does not come, or differs, is named in the leader's log until load_timeout_s. A lost rank
is seen by its node, which says LOST. A lost node's connection ends, or its packets are not acknowledged
(TCP_USER_TIMEOUT); a frozen one's beats stop. A node sees the same of its leader. A step that hangs before that is
ended by engine_stall_s. Strangers without a certificate that has all the names of the leader's own get no further
than TLS. Collectives (gloo, NCCL) and the store have no TLS: they belong behind network policies.
"""
