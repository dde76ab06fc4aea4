"""Initial values of models on the meta device, and initial values from the first rank."""
