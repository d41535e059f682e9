"""Direct links between drafts and targets, beside their coordinators' streams.

A coordinator grants a session's link to both ends with a random key. The draft joins the session at the target with
that key. From then on the target sends it each verdict's tokens, and takes its proposals, without the coordinator
between. Both ends go back to the coordinator's relay at any time: tokens overlap, and proposals are checked as always.
"""

from specdec.replica.worker.links.draft_end import DraftEnd
from specdec.replica.worker.links.link_end import LinkEnd
from specdec.replica.worker.links.target_end import TargetEnd

__all__ = ["DraftEnd", "LinkEnd", "TargetEnd"]
