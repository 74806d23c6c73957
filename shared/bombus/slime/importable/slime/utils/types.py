"""Names of `slime.utils.types`."""

from bombus.slime.types import SlimeSample as Sample

__all__ = ["Sample"]
