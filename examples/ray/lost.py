"""What a client is told when its request gets no further than the front, in the words of the API it called."""

from ninfer_runtime.serve.errors import Problem, dialect_of
from ninfer_runtime.serve.sse import DONE, compact_json, data_frame, named_frame

LOST = Problem(503, "the replica that answered has died; ask again", "replica_lost", retry_after=1)
TOO_LARGE = Problem(413, "the request's body is larger than this server takes", "request_too_large")


def error_event(path: str, n_events: int) -> bytes:
    """The event that ends a stream of which ``n_events`` events have been sent."""
    dialect = dialect_of(path)
    if dialect == "anthropic":
        return named_frame("error", compact_json(LOST.body("anthropic")))
    if path.startswith("/v1/responses"):
        error = {
            "type": "error",
            "sequence_number": n_events,
            "code": LOST.code,
            "message": LOST.message,
            "param": None,
        }
        return named_frame("error", compact_json(error))
    return data_frame(compact_json(LOST.body("openai"))) + DONE


def refusal(path: str, problem: Problem) -> bytes:
    """The body of a response that had not begun."""
    return problem.encoded(dialect_of(path))
