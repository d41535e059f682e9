"""`specdec plan`: the cheapest deployment for a load, found by simulation with the services' own policies.

Entities and events, on one SimPy clock:

- *Pair* (`simulation/pair.py`): a target and its share of a draft, step by step. `Pacing` (hold-off, gate, choice of
  nodes, step clock) and `GrowthPolicy` are the services' own classes on the simulated clock. Events: the end of a
  step, a proposal or a commit that arrives. It ends in a `ReplicaCurve`: turns and tokens per turn by sessions.
- *Target* (`simulation/target.py`): a replica of a fleet. Events: the end of a step over all its sessions, drawn from
  the curve; prompts are computed in chunks beside them.
- *Coordinator* (`simulation/coordinator.py`): `AdmissionQueue`, `FairQueue`, `TenantLimits`, `LoadShedding`,
  `PrefixRouter`, `OutlierDetector` and `Backoff` are the coordinator's own; their coroutines run on
  `SimulatedLoop`. Events: arrival, place, first token, end, loss of a replica, retry.
- *Faults* (`simulation/faults.py`): a replica, a node or a zone ends, and comes back; rolling updates;
  `simulation/autoscaler.py` has the chart's rules.

Grain: one event per step of a replica, never one per token: a step over 200 sessions is a few operations on arrays.

Invariants, each with a test:

- every request that arrived ended, was refused, failed or runs; none does two of these;
- a stream's tokens are committed once, whatever replica ends;
- equal seeds give equal results;
- one server with steps of one length and Poisson arrivals waits as the M/D/1 queue does.

Not simulated: tokens' values, texts, caches of prefixes within a replica but for the router's choice, memory
fragmentation, the network's bandwidth. A draft's acceptance depends on the depth alone, and nodes of one depth have
one score, so the choice among nodes gains nothing: the speed-up is on the low side.
"""
