"""Values that are assigned to sharded parameters: ``module.weight = nn.Parameter(...)``,
``load_state_dict(assign=True)``."""
