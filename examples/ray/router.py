"""Ray Serve's choice of a replica: the session's favourite, and the next one when that is full or gone."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from sessions import ranked


class SessionRouter(RequestRouter):
    """Routes calls whose first argument is the key of a session."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank: the others are asked only when the ones before them take no more."""
        by_id: dict[str, Any] = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        key = str(pending_request.args[0]) if pending_request is not None and pending_request.args else ""
        return [[by_id[unique_id]] for unique_id in ranked(key, by_id)]
