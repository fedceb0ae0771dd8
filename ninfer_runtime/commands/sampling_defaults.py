"""Sampling parameters of one request: model defaults, then the artifact's, then what the user said."""

from ninfer_format.errors import UsageError
from ninfer_runtime.commands.options import SamplingOptions
from ninfer_runtime.commands.session import Session
from ninfer_runtime.config import SamplingParams
from ninfer_runtime.engine.asking import default_sampling


def resolve_sampling(session: Session, options: SamplingOptions, *, thinking: bool) -> SamplingParams:
    """The parameters in force for a prompt rendered in that mode; the seed stays None when none was given.

    Without options they are those of ``default_sampling``; ``--greedy`` means argmax and no penalties but given ones.
    """
    if options.greedy:
        given = {name: value for name, value in options.overrides().items() if name not in ("temperature", "top_p")}
        if options.temperature:
            raise UsageError("--greedy is temperature 0; leave out --temperature or --greedy")
        return SamplingParams.greedy().merged(**{**given, "top_k": 0})
    base = default_sampling(
        session.artifact.identity, session.frontend.generation, session.architecture, thinking=thinking
    )
    return base.merged(**options.overrides())
