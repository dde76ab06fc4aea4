"""The base class of the objects in ``fe.shard(..., extensions=[...])``.

This class is a seam (see ``docs/design.md``). An object of a subclass selects one extension for one
engine, and holds its arguments. The functions that build an engine run these steps on all ranks:

1. They call ``mesh_of_engine``.
2. They read ``codec_rules``, and make the plan.
3. They call ``check``. Nothing has been changed yet; an error is raised on all ranks.
4. They call ``signature``, and compare the results of all ranks.
5. They call ``memory``.
6. They call ``prepare``. The model is still unsharded, and no buffer has memory.
7. They build the buffers and the engine.
8. They call ``start``.

``setup``, ``resources`` and ``engine`` are annotated with ``Any`` here, because the modules of
their classes import this module. Subclasses annotate them with their classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EngineExtension:
    """One extension of one engine. The methods of this base class do nothing.

    A subclass is usually a frozen dataclass whose constructor checks each argument. An engine has
    at most one extension of each class.

    Attributes:
        codec_rules: Rules that select the codec of a parameter's all-gather
            (``fsdp_engine.codecs.CodecRule``). Rules of earlier extensions are tried first.
        awaits_late_gradients: Modules may compute weight gradients after backward.
        replaces_reductions: The extension replaces the communicators that reduce gradients.
        divides_mesh: ``mesh_of_engine`` returns a part of the mesh.
    """

    awaits_late_gradients = False
    replaces_reductions = False
    divides_mesh = False

    @property
    def codec_rules(self) -> Sequence[Any]:
        """Rules that select the codec of a parameter's all-gather."""
        return ()

    def signature(self) -> str:
        """Returns a text that must be equal on all ranks. A subclass leaves out arguments that may
        differ between ranks."""
        return repr(self)

    def mesh_of_engine(self, mesh: Any, levels: Any) -> Any:
        """Returns the data-parallel ranks over which the engine shards and reduces.

        Args:
            mesh: All ranks of the user's mesh, an object of ``fsdp_engine.comm.mesh.DataMesh``.
            levels: The levels on both axes, an object of ``fsdp_engine.strategies.Strategy``.

        Raises:
            Exception: The extension cannot be used on this mesh. All ranks raise, because they
                have the same arguments.
        """
        return mesh

    def check(self, setup: Any) -> None:
        """Check the extension against the model, the plan and the other arguments. It must not call
        collectives, and must not change anything.

        Args:
            setup: The model, the plan, the settings and the meshes: an object of
                ``fsdp_engine.units.build.EngineSetup``.

        Raises:
            Exception: The engine cannot use the extension. All ranks raise an error.
        """

    def refuse_other_ranks(self, setup: Any) -> None:
        """Check that all ranks of the mesh share all parameters. For ``check`` of subclasses.

        Args:
            setup: See ``check``.

        Raises:
            ValueError: The model has experts on other ranks, or a tensor-parallel parameter, which
                the message names.
        """
        name = type(self).__name__
        if setup.experts is not None:
            raise ValueError(
                f"extensions: expected no expert mesh, since {name} does not support experts on "
                "other ranks; found one"
            )
        for record in setup.plan.records:
            if record.spread is not None:
                raise ValueError(
                    f"{record.name}: expected no tensor-parallel parameter, since {name} does not "
                    "support them; found a DTensor"
                )

    def memory(self, setup: Any) -> Any:
        """Returns the memory manager of the engine, an object of
        ``fsdp_engine.memory.allocator.Memory``; None: the default one. All ranks have agreed on the
        plan before this call.

        Args:
            setup: See ``check``.
        """
        return None

    def prepare(self, setup: Any, resources: Any) -> None:
        """Change the model, or the way in which its buffers are built. All ranks have agreed on the
        plan before this call.

        Args:
            setup: See ``check``.
            resources: The memory and the lanes of the engine, an object of
                ``fsdp_engine.units.build.Resources``.
        """

    def start(self, engine: Any) -> None:
        """Attach the extension to the engine, for example by adding objects to its lists.

        Args:
            engine: The ``Engine``, which has just been built.
        """
