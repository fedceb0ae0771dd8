"""What can be wrong with a medium.

RequestError
├── MediaError            it is refused: its source, its form, its size
│   └── MediaBudgetError  the request brings too many or too large ones
GenerationError
└── MediaFetchError       a remote host did not give it
    └── MediaTimeoutError it took too long
"""

from ninfer_format.errors import GenerationError, RequestError


class MediaError(RequestError):
    """A medium that is refused, whoever asks."""


class MediaBudgetError(MediaError):
    """More media, or more bytes of them, than one request may bring."""


class MediaFetchError(GenerationError):
    """A remote host that did not deliver."""


class MediaTimeoutError(MediaFetchError):
    """A remote host that was too slow."""
