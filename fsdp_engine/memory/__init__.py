"""The engine's allocations: storages, arenas, pinned and registered memory."""
