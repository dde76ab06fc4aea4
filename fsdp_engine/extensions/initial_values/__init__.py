"""Initial values that ranks have not built: of models on the meta device, and of the first rank."""
