"""The engine's allocations: storages, pinned and registered memory."""
