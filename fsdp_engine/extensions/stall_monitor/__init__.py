"""Which ranks are missing where a wait fails, or takes long."""

from fsdp_engine.comm.activity import Monitor, monitor_by


def register() -> None:
    """Let ranks that have met start a monitor."""
    monitor_by(_make)


def _make() -> Monitor:
    from fsdp_engine.extensions.stall_monitor.stall_monitor import StallMonitor

    return StallMonitor()
