"""DiLoCo: replicas train independently, and an outer optimizer steps along their mean movement.

The replicas are the rows of the mesh: the ranks of one replica are its inner axis. The engine is
built over one row, so that gradients, norms and checkpoints are those of one replica. Every
``every`` steps the replicas exchange their *movement*: the outer weights, which all replicas share,
minus their own weights. The mean movement is the gradient of the outer optimizer, which steps the
outer weights. Replicas then continue from the outer weights.

Sources: DiLoCo, https://arxiv.org/abs/2311.08105, algorithm 1; Streaming DiLoCo,
https://arxiv.org/abs/2501.18512, algorithm 2 (fragments, delay, alpha, exchange in 4 bits).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_engine.comm.agreement import agree
from fsdp_engine.comm.mesh import DataMesh
from fsdp_engine.engine import Engine
from fsdp_engine.engine_extension import EngineExtension
from fsdp_engine.extension_list import find_module, implementation
from fsdp_engine.extensions.outer_optimizer.fragment import NESTEROV, Fragment
from fsdp_engine.extensions.outer_optimizer.outer_training import OuterTraining, fragments_of
from fsdp_engine.memory import allocator
from fsdp_engine.optim.sharded_step import is_elementwise
from fsdp_engine.optim.state_format import StateFormat
from fsdp_engine.strategies import Axis, Role, Strategy
from fsdp_engine.units.build import EngineSetup, Resources

UNITS = "units"


@dataclass(frozen=True)
class OuterOptimizer(EngineExtension):
    """Trains the rows of the mesh as replicas, which exchange weights every ``every`` steps.

    Pass it in ``extensions`` of ``fe.shard``, with a mesh of two axes (replicas, ranks of a
    replica)::

        outer = fe.OuterOptimizer(every=50)
        engine = fe.shard(model, (2, 8), extensions=[outer])
        optimizer = torch.optim.AdamW(model.parameters())
        for batch in data:  # each rank of each replica has its own
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.step(engine)
        outer.synchronize(engine)

    Each replica has an engine, whose gradients, ``clip_grad_norm_``, state dicts and checkpoints
    include the ranks of this replica only. Buffers, such as statistics of batch normalization, are
    not exchanged.
    ``engine.mesh.part_of`` is the mesh of all replicas.

    Outer weights, and the state of the outer optimizer, are sharded as optimizer state is along the
    inner axis (replicated at "no_shard"), in fp32 at least.

    Args:
        every: Number of inner steps between two exchanges of a parameter.
        optimizer: Function that makes the outer optimizer of a fragment from a list of one flat
            parameter, whose gradient is the mean movement. The optimizer must be elementwise, such
            as ``torch.optim.SGD``.
        bits: Bits per element of an exchange, 8 or 4 (see ``fe.QuantizedReduction``, without error
            feedback). None: fp32.
        fragments: Number of sets of units, which are exchanged at different steps, evenly spread
            over ``every`` steps. "units": each unit is a fragment.
        delay: Number of inner steps during which an exchange runs, below ``every``. A replica
            keeps only the share ``alpha`` of its progress in these steps.
        alpha: The share of a replica's own weights in the weights with which it continues, in [0,
            1]. The rest is the share of the outer weights.
        on_host: Store outer weights, and the outer optimizer's state, in memory of the host. They
            are always stored there if main weights are offloaded.

    Raises:
        TypeError, ValueError: An argument is invalid. Raised by ``fe.shard`` on all ranks:
            ``outer_strategy`` is not "no_shard"; the optimizer is not elementwise; there are more
            fragments than units; parameters are complex, tensor-parallel, or experts on other
            ranks; models or arguments differ between replicas.
    """

    every: int
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = field(default=NESTEROV)
    bits: int | None = None
    fragments: int | str = 1
    delay: int = 0
    alpha: float = 0.0
    on_host: bool = False
    divides_mesh = True

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name}: expected an integer of at least {least}; found {value!r}"
                )
        if self.delay >= self.every:
            raise ValueError(
                f"delay: expected less than every={self.every}, so that an exchange ends before "
                f"the next one begins; found {self.delay}"
            )
        if not callable(self.optimizer):
            raise TypeError(
                "optimizer: expected a function that makes an optimizer from a list of parameters, "
                f"such as partial(torch.optim.SGD, lr=0.7); found {self.optimizer!r}"
            )
        if self.bits is not None and (type(self.bits) is not int or self.bits not in (8, 4)):
            raise ValueError(f"bits: expected 8, 4 or None; found {self.bits!r}")
        is_number = isinstance(self.fragments, int) and not isinstance(self.fragments, bool)
        if self.fragments != UNITS and not (is_number and self.fragments >= 1):  # type: ignore[operator]
            raise ValueError(
                f'fragments: expected a positive integer or "units"; found {self.fragments!r}'
            )
        is_number = isinstance(self.alpha, int | float) and not isinstance(self.alpha, bool)
        if not is_number or not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha: expected a number in [0, 1]; found {self.alpha!r}")
        if not isinstance(self.on_host, bool):
            raise TypeError(f"on_host: expected a bool; found {self.on_host!r}")

    def signature(self) -> str:
        """Returns the arguments as text. A function is described by its name and arguments, since
        its address differs between ranks."""
        values = {**vars(self), "optimizer": _described(self.optimizer)}
        return f"OuterOptimizer({', '.join(f'{key}={value!r}' for key, value in values.items())})"

    def mesh_of_engine(self, mesh: DataMesh, levels: Strategy) -> DataMesh:
        """Returns the ranks of this replica.

        Raises:
            ValueError: A level is chosen for the axis between replicas.
        """
        if any(levels.shards(role, Axis.OUTER) for role in Role):
            raise ValueError(
                'outer_strategy: expected "no_shard" with OuterOptimizer, since each replica has '
                f"its own weights; found {levels.outer.name!r}"
            )
        return mesh.row()

    def check(self, setup: EngineSetup) -> None:
        """See the class.

        Raises:
            TypeError, ValueError: See the class.
        """
        trial = nn.Parameter(allocator.zeros(1, torch.float32, "cpu"))
        made = self.optimizer([trial])
        if not isinstance(made, Optimizer):
            raise TypeError(
                "optimizer: expected a function that makes a torch.optim.Optimizer; it made a "
                f"{type(made).__name__}"
            )
        if not is_elementwise(made, implementation(StateFormat).of(made)):
            raise ValueError(
                "optimizer: expected an elementwise one, such as torch.optim.SGD or AdamW, since "
                f"outer weights are flat shards; found {type(made).__name__}"
            )
        given = [each for group in made.param_groups for each in group["params"]]
        if len(given) != 1 or given[0] is not trial or len(made.param_groups) != 1:
            raise ValueError(
                "optimizer: expected one over the parameters that the function was given, in one "
                f"group; found one over {len(given)} parameters in {len(made.param_groups)} groups"
            )
        setup.kept[OuterOptimizer] = {**made.param_groups[0], "params": ()}
        if self.bits is not None:
            find_module("quantized_reduction", "bits")
        self.refuse_other_ranks(setup)
        trainable = [
            [each for each in unit.buffers if each.kind.requires_grad] for unit in setup.plan.units
        ]
        for buffer in (each for unit in trainable for each in unit):
            if buffer.kind.dtypes.main.is_complex:
                raise ValueError(
                    f"{buffer.records[0].name}: expected a real parameter, with OuterOptimizer; "
                    f"found {buffer.kind.dtypes.main}"
                )
        num_units = sum(map(bool, trainable))
        if not num_units:
            raise ValueError("model: expected trainable parameters for OuterOptimizer; found none")
        if not all(fragments_of(trainable, self.fragments)):
            raise ValueError(
                f"fragments: expected at most {num_units}, the number of units with trainable "
                f"parameters; found {self.fragments}"
            )

    def prepare(self, setup: EngineSetup, resources: Resources) -> None:
        """Compare the plan and the options between replicas.

        Raises:
            ValueError: They differ between replicas. Raised on all ranks.
        """
        whole, settings = setup.data.part_of, setup.settings
        assert whole is not None
        signatures = [each.signature() for each in settings.extensions]
        numbers = setup.kept[OuterOptimizer]
        values = (settings.policy, settings.options, signatures, numbers, setup.plan.signature())
        own = hashlib.sha256(repr(values).encode()).hexdigest()
        digests = agree("shard()", None, whole.control_group, own)
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise ValueError(
                    "extensions: expected the same model, mp_policy, options and extensions in all "
                    "replicas of OuterOptimizer; found different ones on ranks "
                    f"{whole.ranks[0]} and {whole.ranks[rank]}"
                )

    def start(self, engine: Engine) -> None:
        """Make the fragments, and observe the engine's steps.

        Raises:
            Exception: Any error of a rank, such as too little memory for outer weights. Raised on
                all ranks.
        """
        error: Exception | None = None
        try:
            self._start(engine)
        except Exception as caught:  # of the user's function, or of an allocation
            error = caught
        whole = engine.mesh.part_of
        assert whole is not None
        agree("shard()", error, whole.control_group)

    def _start(self, engine: Engine) -> None:
        groups = fragments_of([unit.trainable for unit in engine.units], self.fragments)
        fragments = [
            Fragment(number, group, self.optimizer, engine.memory, on_host=self.on_host)
            for number, group in enumerate(groups)
        ]
        OuterTraining(
            engine,
            fragments,
            self,
            every=self.every,
            delay=self.delay,
            bits=self.bits,
            alpha=self.alpha,
        )

    def step(self, engine: Engine) -> None:
        """End an inner step: begin exchanges, and take the outer steps that are due. Call it after
        each step of the optimizer, equally often in all replicas, and also when the optimizer or a
        ``GradScaler`` has skipped a step.

        Args:
            engine: An engine with this extension.

        Raises:
            RuntimeError: A forward or backward is running, no backward has run before, or another
                replica did not take part in an exchange in time.
            ValueError: The engine does not have this extension.
        """
        _training_of(self, engine).step()

    def synchronize(self, engine: Engine) -> None:
        """Exchange all weights, and set the main weights of all replicas to the outer weights: at
        the end of training, or before weights are exported. Collective over all replicas.

        Exchanges that have begun are finished first. A parameter that was exchanged after the last
        inner step is not exchanged again.

        Args:
            engine: An engine with this extension.

        Raises:
            RuntimeError, ValueError: See :meth:`step`.
        """
        _training_of(self, engine).synchronize()

    @contextmanager
    def swapped(self, engine: Engine) -> Iterator[None]:
        """Context within which the model has the outer weights, to evaluate them during training.
        Afterwards it has this replica's weights again, bit for bit. Collective over the replica.
        Temporary memory: a copy of this rank's main weights.

        Args:
            engine: An engine with this extension.

        Raises:
            RuntimeError: A forward or backward is running, or there are no outer weights before the
                first backward. Within the context: a backward or a step of an optimizer begins.
            ValueError: The engine does not have this extension.
        """
        with _training_of(self, engine).swapped():
            yield

    def restart(self, engine: Engine) -> None:
        """Continue from the outer weights, after loading the state of another number of replicas.
        Each replica's progress since its last exchange is dropped. Collective over all replicas.

        Args:
            engine: An engine with this extension.

        Raises:
            RuntimeError: There are no outer weights, or a forward or backward is running.
            ValueError: Replicas have loaded different outer weights, or the engine does not have
                this extension.
        """
        _training_of(self, engine).restart()

    def state(self, engine: Engine) -> OuterTraining:
        """Returns an object with ``state_dict`` and ``load_state_dict``, for ``extra`` of a
        checkpointer. Each replica has a checkpointer with a directory of its own::

            folder = f"run/replica{outer.replica(engine)}"
            fe.Checkpointer(folder, engine, optimizer, extra={"outer": outer.state(engine)})

        A state can be loaded with another number of ranks, and at another level. With another
        number of replicas, call :meth:`restart` after loading.

        Args:
            engine: An engine with this extension.
        """
        return _training_of(self, engine)

    def optimizers(self, engine: Engine) -> list[Optimizer]:
        """Returns the outer optimizer of each fragment, for example for a scheduler.

        Args:
            engine: An engine with this extension.
        """
        return [each.optimizer for each in _training_of(self, engine).fragments]

    def replica(self, engine: Engine) -> int:
        """Returns the index of this replica.

        Args:
            engine: An engine with this extension.
        """
        return _training_of(self, engine).replica


def _training_of(owner: OuterOptimizer, engine: Engine) -> OuterTraining:
    for each in engine.reductions.observers:
        if isinstance(each, OuterTraining) and each.owner == owner:
            return each
    raise ValueError(
        "engine: expected the result of fe.shard with this OuterOptimizer in extensions; found "
        f"{engine!r}"
    )


def _described(function: Any) -> str:
    """Returns the name of a function, with the arguments of a ``partial``."""
    if isinstance(function, partial):
        return f"{_described(function.func)} with {function.args}, {function.keywords}"
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{function.__module__}.{name}"
