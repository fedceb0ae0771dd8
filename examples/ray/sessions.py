"""Which session a request belongs to, and which replicas it prefers. Plain Python: nothing here knows Ray.

Requests of one session share the beginning of their prompts, so the replica that answered the last one has that
beginning in its prefix cache.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Id = TypeVar("Id", bound=str)

SESSION_HEADER = "x-session-id"
RESPONSES = "/v1/responses"
MAX_REMEMBERED = 100_000
PREFIX_CHARS = 2048
_RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[0-9a-f]{32})"')


def ranked(key: str, replica_ids: Iterable[Id]) -> list[Id]:
    """The replicas in the order in which the session prefers them: rendezvous hashing, so that a replica that comes or
    goes moves no session between the others."""
    return sorted(replica_ids, key=lambda replica: hashlib.sha256(f"{replica}\0{key}".encode()).digest())


class Sessions:
    """Finds the session of a request, and remembers under which one a stored response was made."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._of_response: OrderedDict[str, str] = OrderedDict()
        self._most = most

    def key(self, path: str, headers: Mapping[str, str], body: bytes) -> str:
        """The session's key: the header, ``prompt_cache_key``, the session of the response that is continued or
        fetched, or else what the conversation begins with."""
        if named := headers.get(SESSION_HEADER):
            return named
        value = _decoded(body)
        if isinstance(named := value.get("prompt_cache_key"), str):
            return named
        earlier = value.get("previous_response_id") or _id_in(path)
        if isinstance(earlier, str) and earlier in self._of_response:
            self._of_response.move_to_end(earlier)
            return self._of_response[earlier]
        return hashlib.sha256(json.dumps(beginning(value), sort_keys=True).encode()).hexdigest()

    def learn(self, path: str, key: str, chunk: bytes) -> bool:
        """Look for the id of a new response in the first bytes of an answer; False: no use to look further."""
        if path != RESPONSES:
            return False
        found = _RESPONSE_ID.search(chunk)
        if found is None:
            return True
        self._of_response[found[1].decode()] = key
        if len(self._of_response) > self._most:
            self._of_response.popitem(last=False)
        return False


def beginning(value: Mapping[str, Any]) -> list[Any]:
    """What later requests of the same conversation begin with too: instructions, tools, and the turns up to and with
    the first one of the user."""
    turns = value.get("messages", value.get("input", value.get("prompt")))
    first: list[Any] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        first.append(turn if not isinstance(turn, str) else turn[:PREFIX_CHARS])
        if not isinstance(turn, dict) or turn.get("role") == "user":
            break
    return [value.get("system"), value.get("instructions"), value.get("tools"), first]


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _id_in(path: str) -> str | None:
    return path.removeprefix(f"{RESPONSES}/").partition("/")[0] if path.startswith(f"{RESPONSES}/") else None
