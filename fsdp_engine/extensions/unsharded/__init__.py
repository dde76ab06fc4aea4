"""Full main weights in the modules, to be read and edited: ``engine.unsharded()``."""

from fsdp_engine.extensions.unsharded.full_main_weights import is_unsharded, unsharded

__all__ = ["is_unsharded", "unsharded"]
