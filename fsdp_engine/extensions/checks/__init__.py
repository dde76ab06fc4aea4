"""Checks of gradients: NaN, Inf and large norms."""

from fsdp_engine.extensions.checks.gradient_checks import GradientChecks

__all__ = ["GradientChecks"]
