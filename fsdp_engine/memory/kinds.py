"""Kinds of memory in reports and in simulations."""

# By the role in an engine's ledger ("idle": memory of transient storages between uses). Any other
# role is of weights.
KIND_OF_ROLE = {
    "grad": "gradients",
    "full": "transient",
    "staging": "transient",
    "idle": "transient",
    "optimizer": "optimizer",  # chunks of its state in a step
}
