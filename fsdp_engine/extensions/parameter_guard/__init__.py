"""Checks of parameters that users put into a sharded model, whose values are taken:
``module.weight = nn.Parameter(...)``, ``load_state_dict(assign=True)``."""
