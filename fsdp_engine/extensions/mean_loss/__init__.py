"""Mean losses over the samples of all ranks, and loaders of different lengths."""

from fsdp_engine.extensions.mean_loss.even_batches import even_batches, even_steps
from fsdp_engine.extensions.mean_loss.mean_loss import last_mean_loss, mean_loss, weighting_losses

__all__ = ["even_batches", "even_steps", "last_mean_loss", "mean_loss", "weighting_losses"]
