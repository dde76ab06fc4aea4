"""``engine.unsharded()``, within which modules have full main weights that can be edited."""

from fsdp_engine.extensions.unsharded.full_main_weights import is_unsharded, unsharded

__all__ = ["is_unsharded", "unsharded"]
