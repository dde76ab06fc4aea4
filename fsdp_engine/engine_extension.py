"""The base class of the objects in ``fe.shard(..., extensions=[...])``.

A seam. An object of a subclass selects one extension for one engine, and holds its arguments. The
functions that build an engine call its methods in this order, on all ranks:

1. :attr:`EngineExtension.codec_rules` is read, and the plan is made;
2. :meth:`EngineExtension.check`: an error is raised on all ranks, nothing has been changed;
3. all ranks compare :meth:`EngineExtension.signature`;
4. :meth:`EngineExtension.memory`;
5. :meth:`EngineExtension.prepare`: the model is still unsharded, and no buffer has memory;
6. buffers and the engine are built;
7. :meth:`EngineExtension.start`.

Subclasses annotate ``setup``, ``resources`` and ``engine`` with their classes, which are imported
by modules that may import this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class EngineExtension:
    """One extension of one engine. Each method does nothing here.

    A subclass is usually a frozen dataclass whose constructor checks single arguments. An engine
    has at most one extension of each class.

    Attributes:
        codec_rules: Rules that select the codec of a parameter's all-gather, see
            :data:`~fsdp_engine.codecs.CodecRule`. Rules of earlier extensions come first.
        awaits_late_gradients: Modules may compute weight gradients after backward.
    """

    awaits_late_gradients = False

    @property
    def codec_rules(self) -> Sequence[Any]:
        """See the class."""
        return ()

    def signature(self) -> str:
        """Returns the text that must be equal on all ranks. Arguments that may differ between ranks
        are left out."""
        return repr(self)

    def check(self, setup: Any) -> None:
        """Check the extension against the model, the plan and the other arguments. Sends nothing
        and changes nothing.

        Args:
            setup: All that is known before buffers are built: a
                :class:`~fsdp_engine.units.build.EngineSetup`.

        Raises:
            Exception: The engine cannot have the extension. All ranks raise.
        """

    def memory(self, setup: Any) -> Any:
        """Returns the :class:`~fsdp_engine.memory.allocator.Memory` of the engine; None: the plain
        one will do. All ranks have agreed on the plan.

        Args:
            setup: See :meth:`check`.
        """
        return None

    def prepare(self, setup: Any, resources: Any) -> None:
        """Change the model, or how its buffers are built. All ranks have agreed on the plan.

        Args:
            setup: See :meth:`check`.
            resources: The memory and the lanes of the engine: a
                :class:`~fsdp_engine.units.build.Resources`.
        """

    def start(self, engine: Any) -> None:
        """Take part in an engine.

        Args:
            engine: The :class:`~fsdp_engine.engine.Engine`, which has just been built.
        """
