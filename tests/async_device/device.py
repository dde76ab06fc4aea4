"""The device ``deferred`` in Python: the module ``torch.deferred`` and its switches.

:func:`install` brings the device into this process, for good. From then on
``torch.device("deferred")`` is the machine's accelerator, ``torch.deferred`` its module, and
``"deferred"`` a backend of process groups. The device itself is in ``csrc/``; see
``docs/internals/devices.md``.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.async_device.build import load

NAME = "deferred"
DEVICE = torch.device("cpu")  # until `install`

_extension: ModuleType | None = None


def _ext() -> Any:
    assert _extension is not None, "install() was not called in this process"
    return _extension


def install() -> None:
    """Registers the device; the extension must have been built. A second call does nothing."""
    global _extension, DEVICE
    if _extension is not None:
        return
    torch.utils.rename_privateuse1_backend(NAME)
    _extension = load()
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend(NAME, _make_group, devices=[NAME])
    DEVICE = torch.device(NAME, 0)
    # Threads that still run kernels while the process unloads torch would crash it.
    atexit.register(_extension.synchronize, "exit")


def _make_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    below = dist.ProcessGroupGloo(dist.PrefixStore("below", store), rank, size, timeout)
    return _ext().make_group(below)


class Stream(torch.Stream):
    """A stream of the device: a new one, or a wrapper of an existing stream's id."""

    def __new__(cls, device: Any = None, priority: int = 0, **ids: Any) -> Stream:
        if ids:
            return super().__new__(cls, priority=priority, **ids)
        return super().__new__(cls, device=DEVICE, priority=priority)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        """Records an event, a new one unless given."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: torch.Event) -> None:
        """Makes later work on this stream wait for ``event``; the host does not wait."""
        event.wait(self)

    def wait_stream(self, stream: torch.Stream) -> None:
        """Makes later work on this stream wait for the work that ``stream`` has now."""
        event = Event()
        event.record(stream)
        event.wait(self)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
    """An event of the device. Not a subclass, since ``torch.Event.elapsed_time`` rejects
    subclasses."""
    return torch.Event(
        DEVICE, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
    )


class stream(contextlib.AbstractContextManager[None]):
    """Makes ``stream`` the current one of this thread within the block; None does nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before.append(torch.accelerator.current_stream())
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before.pop())


class device(contextlib.AbstractContextManager[None]):
    """There is one device, so it is current before, within and after the block."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __exit__(self, *_: object) -> None:
        return None


def _module() -> ModuleType:
    """What ``torch.get_device_module`` returns."""
    ext = _ext()
    generator = ext.default_generator()
    default = Stream(stream_id=0, device_index=0, device_type=_device_type())

    def current_stream(device: Any = None) -> torch.Stream:
        now = torch.accelerator.current_stream()
        return Stream(
            stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type
        )

    module = ModuleType(f"torch.{NAME}", "The device of tests/async_device.")
    for key, value in {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "Event": Event,
        "Stream": Stream,
        "current_device": lambda: 0,
        "current_stream": current_stream,
        "default_generators": (generator,),
        "default_stream": lambda device=None: default,
        "device": device,
        "device_count": lambda: 1,
        "empty_cache": torch.accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: NAME,
        "get_rng_state": lambda device=None: generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,  # without it torch 2.11 does not synchronize the device
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": torch.accelerator.max_memory_allocated,
        "memory_allocated": torch.accelerator.memory_allocated,
        "memory_stats": torch.accelerator.memory_stats,
        "reset_peak_memory_stats": torch.accelerator.reset_peak_memory_stats,
        "set_device": lambda device: torch.accelerator.set_device_index(0),
        "set_rng_state": lambda state, device=None: generator.set_state(state),
        "set_stream": torch.accelerator.set_stream,
        "stream": stream,
        "synchronize": lambda device=None: ext.synchronize("synchronize"),
    }.items():
        setattr(module, key, value)
    return module


def _device_type() -> int:
    return torch.Stream(torch.device(NAME)).device_type


@contextlib.contextmanager
def delays(
    compute: float = 0.0,
    copy: float = 0.0,
    collective: float = 0.0,
    host: float = 0.0,
    *,
    streams: dict[int, float] | None = None,
    seed: int | None = None,
) -> Iterator[None]:
    """Slows the device within the block, which ends with a synchronisation.

    Args:
        compute, copy, collective: seconds before each kernel, copy, collective.
        host: seconds before each submission, in the host.
        streams: seconds for each kernel, copy and collective of a stream, by its id.
        seed: seconds are drawn uniformly between 0 and the given ones, from this seed, the stream
            and the position of the job. None: delays are exactly the given seconds.
    """
    _ext().set_delays(compute, copy, collective, host, streams or {}, seed is not None, seed or 0)
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        _ext().set_delays(0.0, 0.0, 0.0, 0.0, {}, False, 0)


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """Within the block ``stream``, or the current one, runs no work enqueued after entry.

    The host must not wait for it there. A test of order that holds a stream depends on no clock.
    """
    target = torch.accelerator.current_stream() if stream is None else stream
    gate = _ext().close_gate(target.stream_id)
    try:
        yield
    finally:
        gate.open()


# The call site of a wait is the innermost frame outside these files.
_LIBRARY = (str(Path(torch.__file__).parent), __file__, "<frozen")


def _call_site(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY):
        frame = frame.f_back
    if frame is None:
        return "a thread of torch"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@contextlib.contextmanager
def count_host_syncs() -> Iterator[Counter[tuple[str, str]]]:
    """Counts, by (reason, call site), each time the host waits for the device within the block."""
    counts: Counter[tuple[str, str]] = Counter()

    def observe(reason: str) -> None:
        counts[reason, _call_site(sys._getframe().f_back)] += 1

    _ext().set_observer(observe)
    try:
        yield counts
    finally:
        _ext().set_observer(None)


def num_stream_waits() -> int:
    """Stream-ordered waits that programs asked for, since :func:`without_wait` was last entered."""
    return int(_ext().num_stream_waits())


def num_jobs(stream: torch.Stream) -> int:
    """Kernels, copies and collectives that ``stream`` has been given in this process."""
    return int(_ext().num_jobs(stream.stream_id))


@contextlib.contextmanager
def without_wait(index: int) -> Iterator[None]:
    """Within the block the wait with this number is left out; -1: none is."""
    _ext().drop_wait(index)
    try:
        yield
    finally:
        torch.accelerator.synchronize()
        _ext().drop_wait(-1)
