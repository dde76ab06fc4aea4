"""Checks of values that users assign to parameters of a sharded model:
``module.weight = nn.Parameter(...)``, ``load_state_dict(assign=True)``."""
