"""The `.ninfer` container: read, write, encode, decode, plan, verify and migrate.

Needs only numpy. Public names are loaded on first use, so importing the package costs almost nothing.
"""

from typing import TYPE_CHECKING

from ninfer_format.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from ninfer_format.codec import (
        Words,
        decode_rows,
        decode_tensor,
        encode_tensor,
        gather_rows,
        pack_tensor,
        slice_rows,
        unpack_tensor,
    )
    from ninfer_format.directory import Directory, Identity, ResourceEntry, TensorEntry, canonical_json, parse_directory
    from ninfer_format.errors import (
        ArtifactError,
        DigestError,
        DirectoryError,
        DiskFullError,
        EncodeError,
        GenerationError,
        GeometryError,
        InventoryError,
        MigrationError,
        MissingExtraError,
        NinferError,
        NonFiniteError,
        PayloadError,
        RegistryError,
        RequestError,
        SignatureError,
        SourceError,
        StorageError,
        TruncatedError,
        UnsupportedError,
        UsageError,
        VersionError,
    )
    from ninfer_format.formats import LAYOUTS, NUMERIC_FORMATS, encoded_size
    from ninfer_format.inventory import Inventory, compare_inventory, plan_inventory
    from ninfer_format.migration import migrate
    from ninfer_format.model_config import ModelConfig, config_of, published_config
    from ninfer_format.model_geometry import ModelGeometry
    from ninfer_format.reader import Artifact
    from ninfer_format.recipes import Recipe, recipe_for
    from ninfer_format.verifier import Report, verify
    from ninfer_format.writer import ArtifactWriter

_HOMES = {
    "codec": "Words decode_rows decode_tensor encode_tensor gather_rows pack_tensor slice_rows unpack_tensor",
    "directory": "Directory Identity ResourceEntry TensorEntry canonical_json parse_directory",
    "errors": "ArtifactError DigestError DirectoryError DiskFullError EncodeError GenerationError GeometryError "
    "InventoryError MigrationError MissingExtraError NinferError NonFiniteError PayloadError RegistryError "
    "RequestError SignatureError SourceError StorageError TruncatedError UnsupportedError UsageError VersionError",
    "formats": "LAYOUTS NUMERIC_FORMATS encoded_size",
    "inventory": "Inventory compare_inventory plan_inventory",
    "migration": "migrate",
    "model_config": "ModelConfig config_of published_config",
    "model_geometry": "ModelGeometry",
    "reader": "Artifact",
    "recipes": "Recipe recipe_for",
    "verifier": "Report verify",
    "writer": "ArtifactWriter",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [  # noqa: RUF022 - grouped as in the table above; a test holds it equal to the table
    "Words",
    "decode_rows",
    "decode_tensor",
    "encode_tensor",
    "gather_rows",
    "pack_tensor",
    "slice_rows",
    "unpack_tensor",
    "Directory",
    "Identity",
    "ResourceEntry",
    "TensorEntry",
    "canonical_json",
    "parse_directory",
    "ArtifactError",
    "DigestError",
    "DirectoryError",
    "DiskFullError",
    "EncodeError",
    "GenerationError",
    "GeometryError",
    "InventoryError",
    "MigrationError",
    "MissingExtraError",
    "NinferError",
    "NonFiniteError",
    "PayloadError",
    "RegistryError",
    "RequestError",
    "SignatureError",
    "SourceError",
    "StorageError",
    "TruncatedError",
    "UnsupportedError",
    "UsageError",
    "VersionError",
    "LAYOUTS",
    "NUMERIC_FORMATS",
    "encoded_size",
    "Inventory",
    "compare_inventory",
    "plan_inventory",
    "migrate",
    "ModelConfig",
    "config_of",
    "published_config",
    "ModelGeometry",
    "Artifact",
    "Recipe",
    "recipe_for",
    "Report",
    "verify",
    "ArtifactWriter",
]

__getattr__, __dir__ = _lazy_names(__name__, _HOME)
