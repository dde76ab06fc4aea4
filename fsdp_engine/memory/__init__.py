"""All allocations of the engine: tensors, storages, pinned and registered memory."""
