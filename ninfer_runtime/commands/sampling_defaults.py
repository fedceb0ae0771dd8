"""Sampling parameters of one request: model defaults, then the artifact's, then what the user said."""

from ninfer_format.errors import UsageError
from ninfer_format.published import PUBLISHED
from ninfer_runtime.commands.options import SamplingOptions
from ninfer_runtime.commands.session import Session
from ninfer_runtime.config import SamplingParams


def resolve_sampling(session: Session, options: SamplingOptions, *, thinking: bool) -> SamplingParams:
    """The parameters in force for a prompt rendered in that mode; the seed stays None when none was given.

    A published model has its authors' preset per mode. A custom one follows its `generation_config.json` if that says
    anything, otherwise the preset of its architecture. ``--greedy`` means argmax and no penalties but given ones.
    """
    if options.greedy:
        given = {name: value for name, value in options.overrides().items() if name not in ("temperature", "top_p")}
        if options.temperature:
            raise UsageError("--greedy is temperature 0; leave out --temperature or --greedy")
        return SamplingParams.greedy().merged(**{**given, "top_k": 0})
    suggested = session.frontend.generation.sampling
    if session.artifact.identity in PUBLISHED or not suggested:
        base = SamplingParams.defaults(session.architecture, thinking=thinking)
    else:
        base = SamplingParams().merged(**suggested)
    return base.merged(**options.overrides())
