"""Training and evaluation in which ranks use different modules: ``engine.together()``."""

from fsdp_engine.extensions.different_modules.gather_rounds import ranks_can_differ, together
from fsdp_engine.extensions.different_modules.next_modules import will_use

__all__ = ["ranks_can_differ", "together", "will_use"]
