"""One pool of gloo ranks for the whole test session.

Four processes are started once. A call sends a module-level function to the first ``world_size``
of them; each joins a fresh process group, runs the function, sends what it returned, and destroys
every process group. A call costs some tens of milliseconds.

A rank that raises, hangs or dies is a :class:`RankError` with its traceback, the stacks of every
rank that did not answer, or its exit code. Unless all ranks answered, all processes are killed and
new ones started, so that later tests still run.

A test whose body runs on the ranks is written with :func:`on_ranks`, or with :func:`on_few_ranks`
if one process must pass it, too.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules import module as torch_modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tests.coverage_contexts import current_context, switch_to

NUM_RANKS = 4
GROUP_TIMEOUT_SECONDS = 60.0
# For a whole call. On a busy machine a call of seconds may take minutes; ranks that wait for each
# other in vain fail by the group's timeout.
CALL_TIMEOUT_SECONDS = 240.0
# How long the peers of a rank that failed may take to fail as well.
GRACE_SECONDS = 5.0
START_TIMEOUT_SECONDS = 240.0
# Groups that a call leaves behind (torch's caches hold meshes of DTensors, and a module may hold a
# graph) have threads that wake a hundred times a second. A rank with so many threads is replaced.
MOST_THREADS = 24
# Number of calls between two counts of threads.
CALLS_PER_COUNT = 8
# The state of a rank's process at its start.
_FOLDER = os.getcwd()
_FILTERS = list(warnings.filters)
# torch._dynamo: the first step of an optimizer imports it, in two seconds.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "fsdp_engine.sharding",
    "tests.models",
    "tests.reference",
    __name__,
]


class RankError(RuntimeError):
    """A call failed on some ranks; ``failures``: what each raised, first on ``rank``."""

    def __init__(self, title: str, failures: dict[int, str], rank: int) -> None:
        ranks_of: dict[str, list[int]] = {}
        for each, text in sorted(failures.items()):
            ranks_of.setdefault(text.rstrip(), []).append(each)
        parts = [f"--- rank {_listed(ranks)} ---\n{text}" for text, ranks in ranks_of.items()]
        super().__init__("\n".join([title, *parts]))
        self.failures = failures
        self.rank = rank


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


class Ranks:
    """The pool. Tests get it as the fixture ``ranks``.

    Args:
        num_ranks: how many processes there are.
        backend: the backend of the default process group.
        set_up: a function of a module that each process runs once, when it starts.
    """

    def __init__(
        self,
        num_ranks: int = NUM_RANKS,
        backend: str = "gloo",
        set_up: Callable[[], None] | None = None,
    ) -> None:
        self.num_ranks = num_ranks
        self._backend = backend
        self._set_up = set_up
        self.num_starts = 0
        self._num_calls = 0
        # The store lives here, so that it survives the ranks; each call has its own prefix.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = NUM_RANKS,
        timeout: float = CALL_TIMEOUT_SECONDS,
        group: bool = True,
    ) -> list[Any]:
        """Runs ``fn(*args)`` on ranks 0 to ``world_size - 1``; what each returned, by rank.

        ``fn`` must be a function of a module. Its arguments and results must be picklable. It runs
        with a default process group, after ``torch.manual_seed(0)``. Without ``group`` there is no
        process group, as in ``python train.py``: one rank only.

        Raises:
            RankError: ``fn`` raised, hung for more than ``timeout`` seconds, or died on a rank.
        """
        __tracebackhide__ = True
        assert 1 <= world_size <= self.num_ranks, world_size
        assert group or world_size == 1
        if not self._processes:
            self._start()
        self._num_calls += 1
        prefix = f"call{self._num_calls}"
        call = pickle.dumps((fn, args, world_size, prefix, group, current_context()))
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(call)
        answers, first_failure = self._collect(world_size, timeout)
        if len(answers) < world_size or any(kind == "died" for kind, _ in answers.values()):
            error = self._describe_hang(fn, answers, first_failure, world_size, timeout)
            self.stop()
            raise error
        if not self._release(world_size):
            self.stop()
        failures = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        if first_failure is not None:
            title = f"{fn.__name__} failed on rank {first_failure}"
            raise RankError(title, failures, first_failure)
        return [pickle.loads(answers[rank][1]) for rank in range(world_size)]

    def stop(self) -> None:
        """Kills every rank. The next call starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        """Ends the pool for good. Ranks end by themselves, so that they save what they measured."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(GRACE_SECONDS)
        self.stop()
        shutil.rmtree(self._stacks, ignore_errors=True)

    def _start(self) -> None:
        # Ranks are forked from a process that has imported torch and done nothing with it: they
        # start in milliseconds, where each would import it for seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.num_starts += 1
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            stacks = str(self._stacks / str(rank))
            given = (rank, theirs, self._store.port, stacks, self._backend, self._set_up)
            process = context.Process(target=_serve, args=given, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(START_TIMEOUT_SECONDS):
                self.stop()
                raise RuntimeError(f"rank {rank} did not start in {START_TIMEOUT_SECONDS} s")
            assert pipe.recv_bytes() == b"ready"

    def _collect(
        self, world_size: int, timeout: float
    ) -> tuple[dict[int, tuple[str, Any]], int | None]:
        """Answers by rank, as (kind, content), and the rank that failed first."""
        answers: dict[int, tuple[str, Any]] = {}
        first_failure = None
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size])}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for pipe in multiprocessing.connection.wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                answers[rank] = self._receive(rank, pipe)
                if answers[rank][0] != "value" and first_failure is None:
                    first_failure = rank
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, first_failure

    def _receive(self, rank: int, pipe: Connection) -> tuple[str, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(GRACE_SECONDS)
            return "died", f"died with exit code {self._processes[rank].exitcode}"

    def _release(self, world_size: int) -> bool:
        """Let the ranks destroy their groups; returns whether all have."""
        for pipe in self._pipes[:world_size]:
            pipe.send_bytes(b"release")
        deadline = time.monotonic() + GRACE_SECONDS
        for pipe in self._pipes[:world_size]:
            try:
                is_there = pipe.poll(max(deadline - time.monotonic(), 0))
                if not is_there or pipe.recv_bytes() != b"ready":
                    return False
            except (EOFError, ConnectionResetError):
                return False
        return True

    def _describe_hang(
        self,
        fn: Callable[..., Any],
        answers: dict[int, tuple[str, Any]],
        first_failure: int | None,
        world_size: int,
        timeout: float,
    ) -> RankError:
        silent = [rank for rank in range(world_size) if rank not in answers]
        for rank in silent:
            # faulthandler writes the stacks from the signal handler, also below a blocked call.
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3 if silent else 0.0)
        failures = {}
        for rank in range(world_size):
            if rank in silent:
                stacks = (self._stacks / str(rank)).read_text()
                failures[rank] = f"did not answer; its threads:\n{stacks}"
            elif answers[rank][0] == "value":
                failures[rank] = "returned"
            else:
                failures[rank] = answers[rank][1]
        if first_failure is None:
            title = f"{fn.__name__}: no answer from ranks {silent} in {timeout} s"
            return RankError(title, failures, silent[0])
        title = f"{fn.__name__} failed on rank {first_failure}; no answer from {silent}"
        return RankError(title, failures, first_failure)


def on_ranks(
    world_size: int = NUM_RANKS, timeout: float = CALL_TIMEOUT_SECONDS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that every rank of a fresh world shall run.

    The function's arguments come from ``parametrize``; it cannot have fixtures.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: Ranks, **arguments: Any) -> None:
            __tracebackhide__ = True
            call = (body.__module__, body.__qualname__, arguments)
            ranks.run(_run_body, *call, world_size=world_size, timeout=timeout)

        return _with_arguments(test, body, "ranks")

    return decorate


def on_few_ranks(body: Callable[..., None]) -> Callable[..., None]:
    """Like :func:`on_ranks`: by one process without a group, one with a group, and by two ranks."""

    @pytest.mark.parametrize(
        ("world_size", "group"), [(1, False), (1, True), (2, True)], ids=["alone", "1", "2"]
    )
    @functools.wraps(body)
    def test(ranks: Ranks, world_size: int, group: bool, **arguments: Any) -> None:
        __tracebackhide__ = True
        call = (body.__module__, body.__qualname__, arguments)
        ranks.run(_run_body, *call, world_size=world_size, group=group)

    return _with_arguments(test, body, "ranks", "world_size", "group")


def _with_arguments(test: Any, body: Callable[..., None], *names: str) -> Callable[..., None]:
    """Adds keyword arguments ``names`` to the signature of a test, after those of its body."""
    own = inspect.signature(body).parameters.values()
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    test.__signature__ = inspect.Signature([*own, *added])
    return test


def _run_body(module: str, name: str, arguments: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    # Some modules draw random numbers in their import, which not all ranks run in this call.
    torch.manual_seed(0)
    random.seed(0)
    # The module's attribute is the test; functools.wraps left the body on it.
    test.__wrapped__(**arguments)


def _serve(
    rank: int,
    pipe: Connection,
    store_port: int,
    stacks: str,
    backend: str,
    set_up: Callable[[], None] | None,
) -> None:
    """A rank's life: wait for a call, run it, answer, destroy the groups."""
    stacks_file = open(stacks, "w")  # noqa: SIM115 - faulthandler writes to it until the end
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    threading.Thread(target=_die_with_the_pool, daemon=True).start()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    num_modules = num_calls = 0
    if set_up is not None:
        set_up()
    # Calls may change the environment and signal handlers: accelerate sets RANK and WORLD_SIZE,
    # Lightning resets all handlers.
    environment = dict(os.environ)
    pipe.send_bytes(b"ready")
    while True:
        os.environ.clear()
        os.environ.update(environment)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(rank, call, store, backend)))
        # No rank closes connections while a peer still reads from them: the pool knows when all
        # have answered, or that one has failed.
        assert pipe.recv_bytes() == b"release"
        _leave_group()
        if len(sys.modules) > num_modules:
            num_modules = len(sys.modules)
            # Collecting all objects of torch takes 0.15 s: freeze them, so that later collections
            # skip them.
            gc.freeze()
        num_calls += 1
        pipe.send_bytes(b"tired" if num_calls % CALLS_PER_COUNT == 0 and _is_tired() else b"ready")


def _is_tired() -> bool:
    wait_for_groups()
    return _num_threads() >= MOST_THREADS


def _num_threads() -> int:
    """Threads of this process. Each group that something still holds has one."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


def _die_with_the_pool() -> None:
    """A test process that is killed leaves no rank behind, whatever the rank is waiting for."""
    pool = multiprocessing.parent_process()
    assert pool is not None
    pool.join()
    os._exit(1)


def _answer(rank: int, call: bytes, store: dist.Store, backend: str) -> tuple[str, Any]:
    try:
        fn, args, world_size, prefix, group, context = pickle.loads(call)
        switch_to(context)
        torch.manual_seed(0)
        random.seed(0)
        if group:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(prefix, store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
            )
        return "value", pickle.dumps(fn(*args))
    except BaseException:
        text = traceback.format_exc()
    # Outside the handler no traceback keeps the groups alive any more.
    _leave_group()
    wait_for_groups()  # peers must see that the connections are closed
    return "error", text


_going: list[threading.Thread] = []


def wait_for_groups() -> None:
    """Wait until groups of earlier calls, with their connections and threads, are destroyed."""
    while _going:
        _going.pop().join()


def _let_go(group: dist.ProcessGroup) -> None:
    """Run in a thread: its reference to the group is the last one, and the group ends with it."""


def _leave_group() -> None:
    wait_for_groups()
    gc.collect()  # frees objects that still refer to a group
    if dist.is_initialized():
        # Destroying a group takes some 20 ms, until its threads have stopped. So each group gets a
        # thread, and they may overlap with the next call.
        groups = list(distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        while groups:
            _going.append(threading.Thread(target=_let_go, args=(groups.pop(),), daemon=True))
            _going[-1].start()
    _restore_defaults()


def _restore_defaults() -> None:
    """Undo changes of a call to settings of the process."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    for hooks in _global_hooks():
        for key, hook in list(hooks.items()):
            if getattr(hook, "__module__", "").startswith("tests."):  # the package's hooks stay
                del hooks[key]
    os.chdir(_FOLDER)
    warnings.filters[:] = _FILTERS  # type: ignore[index]


def _global_hooks() -> list[dict[int, Any]]:
    """Hooks that every module or every optimizer runs."""
    of_modules = [
        hooks
        for name, hooks in vars(torch_modules).items()
        if name.startswith("_global_") and name.endswith("hooks")
    ]
    return [*of_modules, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]  # type: ignore[list-item]
