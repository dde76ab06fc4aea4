"""Which strategy to take: bytes and traffic by formulas, and the engine's own simulated steps."""
