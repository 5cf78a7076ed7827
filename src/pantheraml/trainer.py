"""Names that Unsloth scripts import for their trainers."""

from pantheraml.base.errors import MissingExtraError

try:
    from pantheraml.data.vision_collator import UnslothVisionDataCollator
except ModuleNotFoundError as err:
    if err.name != "PIL":
        raise
    raise MissingExtraError(
        "UnslothVisionDataCollator needs Pillow, which is not installed.", fix="pip install 'pantheraml[vision]'"
    ) from err

__all__ = ["UnslothVisionDataCollator"]
