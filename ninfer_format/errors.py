"""The exception tree of all three packages; every class carries the exit code a command ends with.

    NinferError                      1
    ├── UsageError                   2   arguments that cannot work
    │   └── MissingExtraError        2   an optional dependency is not installed
    ├── StorageError                 3   reading or writing failed
    │   └── DiskFullError            3   no space, quota or file size limit
    ├── UnsupportedError             4   well-formed, but not for this release
    │   ├── VersionError             4   container version 1, or 3 and later
    │   └── RegistryError            4   unknown numeric format, layout or resource encoding
    ├── ArtifactError                1   the file is wrong
    │   ├── TruncatedError           1   shorter than its own header says
    │   ├── DirectoryError           1   JSON text or schema of the directory
    │   ├── GeometryError            1   spans: order, alignment, overlap, bounds
    │   ├── SignatureError           1   format, layout and shape do not go together
    │   ├── PayloadError             1   illegal words in a payload
    │   ├── InventoryError           1   objects differ from what the identity or config requires
    │   ├── DigestError              1   a SHA-256 or an index does not match
    │   └── MigrationError           1   version 1 → 2 refused or rolled back
    ├── EncodeError                  1   values that a format cannot hold
    ├── SourceError                  1   a checkpoint that cannot be converted
    └── GenerationError              1   a request the engine had to end
        ├── RequestError             2   a request that could never run
        │   └── MemberError          2   one member of it is wrong
        │       └── VisionDisabledError  2   an image or a video where only text runs
        ├── NonFiniteError           1   NaN or infinity among the logits
        ├── OverloadedError          1   as many requests wait as may
        ├── QueueTimeoutError        1   a request waited longer than it may
        └── EngineStoppedError       1   the engine is closing, or its device failed

Messages say what was found, what was expected, where, and what to do.
"""

from typing import ClassVar


class NinferError(Exception):
    """Root of the tree; ``exit_code`` is what a command returns for it."""

    exit_code: ClassVar[int] = 1


class UsageError(NinferError):
    """Arguments that cannot work together or name something that does not exist."""

    exit_code = 2


class MissingExtraError(UsageError):
    """An optional dependency is absent; the message names the extra to install."""


class StorageError(NinferError):
    """The operating system refused to read or write."""

    exit_code = 3


class DiskFullError(StorageError):
    """No space left, quota exceeded, or the file size limit reached."""


class UnsupportedError(NinferError):
    """Well-formed input that this release does not handle."""

    exit_code = 4


class VersionError(UnsupportedError):
    """A container of another version: 1 (migrate it) or 3 and later (newer than this release)."""


class RegistryError(UnsupportedError):
    """A numeric format, layout or resource encoding outside the closed registry."""


class ArtifactError(NinferError):
    """The artifact file is wrong."""


class TruncatedError(ArtifactError):
    """The file is shorter than its header or directory requires."""


class DirectoryError(ArtifactError):
    """The directory is not strict JSON of the closed schema."""


class GeometryError(ArtifactError):
    """Object spans out of order, misaligned, overlapping or out of bounds."""


class SignatureError(ArtifactError):
    """Format, layout and shape do not go together, or the recorded size is not theirs."""


class PayloadError(ArtifactError):
    """A payload holds words its format forbids."""


class InventoryError(ArtifactError):
    """The objects differ from those the identity or the stored config requires."""


class DigestError(ArtifactError):
    """A digest, or the index that records it, does not match the file."""


class MigrationError(ArtifactError):
    """A version-1 file that cannot be migrated, or a migration that was rolled back."""


class EncodeError(NinferError):
    """Values that the target format cannot hold (NaN, infinity, scale overflow)."""


class SourceError(NinferError):
    """A checkpoint that cannot be converted."""


class GenerationError(NinferError):
    """A request the engine had to end; the engine itself stays usable."""


class RequestError(GenerationError):
    """A request that could never run with the engine as started."""

    exit_code = 2


class MemberError(RequestError):
    """A member of a request is wrong. ``place`` names it, as in ``messages[1].content``."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")
        self.place = place


class VisionDisabledError(MemberError):
    """An image or a video, where only text runs."""


class NonFiniteError(GenerationError):
    """The model produced NaN or infinity among the addressable logits."""


class OverloadedError(GenerationError):
    """As many requests wait as may; try again later."""


class QueueTimeoutError(GenerationError):
    """A request waited longer for its turn than it may."""


class EngineStoppedError(GenerationError):
    """The engine is closing or its device failed: nothing runs on it any more."""
