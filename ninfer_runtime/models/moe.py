"""The sparse architecture: a router, banks of experts, and one shared expert with its own gate."""

from dataclasses import dataclass

from ninfer_runtime.models.qwen3_5 import MlpWeights
from ninfer_runtime.models.views import Parts, View, take


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """router [experts, hidden], shared_gate [1, hidden]; each bank holds all experts' rows one after the other.

    Expert e owns rows ``e * 2F .. e * 2F + F`` (gate) and the next F (up) of ``routed_gate_up``, and rows
    ``e * H .. (e + 1) * H`` of ``routed_down``.
    """

    router: View
    shared_gate: View
    routed_gate_up: View
    routed_down: View
    shared: MlpWeights


def bind_moe(parts: Parts, prefix: str) -> MoeWeights:
    """The sparse feed-forward network under ``prefix``."""
    return MoeWeights(
        router=take(parts, "router", prefix),
        shared_gate=take(parts, "shared_gate", prefix),
        routed_gate_up=take(parts, "routed_gate_up", prefix),
        routed_down=take(parts, "routed_down", prefix),
        shared=MlpWeights(
            gate=take(parts, "gate", prefix), up=take(parts, "up", prefix), down=take(parts, "shared_down", prefix)
        ),
    )
