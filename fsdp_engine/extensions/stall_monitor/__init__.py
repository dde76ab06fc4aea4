"""Monitor that finds the ranks that are missing when a wait fails or takes long."""

from fsdp_engine.comm.activity import Monitor, monitor_by


def register() -> None:
    """Register the monitor, which starts after ranks have met."""
    monitor_by(_make)


def _make() -> Monitor:
    from fsdp_engine.extensions.stall_monitor.stall_monitor import StallMonitor

    return StallMonitor()
