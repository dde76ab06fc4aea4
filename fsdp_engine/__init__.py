"""A sharded training engine for PyTorch, with one core for DDP, ZeRO-1/2/3, HSDP and HFSDP.

``shard(model)`` shards a model and returns its ``Engine``. Optional features are classes, whose
objects are passed to ``shard(extensions=[...])`` or used directly. ``extension_list.EXTENSIONS``
lists them.
"""

import importlib
import pkgutil
import warnings
from typing import TYPE_CHECKING, Any

from fsdp_engine.extension_list import find_name, names_of

if TYPE_CHECKING:
    from fsdp_engine.checkpoint import (
        Checkpointer,
        LocalCheckpointer,
        export_safetensors,
        load_checkpoint,
        load_safetensors,
        save_checkpoint,
    )
    from fsdp_engine.codecs.base import CodecRules as CodecRules
    from fsdp_engine.engine import Engine
    from fsdp_engine.engine_extension import EngineExtension
    from fsdp_engine.flat_dtensor.tensor import FlatDTensor
    from fsdp_engine.megatron.config import DistributedDataParallelConfig
    from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
    from fsdp_engine.megatron.finalize_model_grads import (
        finalize_model_grads as finalize_model_grads,
    )
    from fsdp_engine.megatron.process_groups import ModelParallelGroups as ModelParallelGroups
    from fsdp_engine.optim.sharded_step import shard_optimizer
    from fsdp_engine.options import Options
    from fsdp_engine.planner.estimates import Estimate as Estimate
    from fsdp_engine.planner.estimates import estimate
    from fsdp_engine.planner.simulation.causal_lm_stages import CausalLMStages as CausalLMStages
    from fsdp_engine.planner.simulation.machine import A100 as A100
    from fsdp_engine.planner.simulation.machine import B200 as B200
    from fsdp_engine.planner.simulation.machine import H100 as H100
    from fsdp_engine.planner.simulation.machine import H200 as H200
    from fsdp_engine.planner.simulation.machine import Machine as Machine
    from fsdp_engine.planner.simulation.machine import TwoWayLink as TwoWayLink
    from fsdp_engine.planner.simulation.pipeline import PipelineSimulation as PipelineSimulation
    from fsdp_engine.planner.simulation.pipeline import simulate_pipeline as simulate_pipeline
    from fsdp_engine.planner.simulation.simulate import Simulation as Simulation
    from fsdp_engine.planner.simulation.simulate import simulate
    from fsdp_engine.planner.simulation.simulation_error import SimulationError as SimulationError
    from fsdp_engine.planner.simulation.tp_plan import apply_tp_plan as apply_tp_plan
    from fsdp_engine.planner.strategy_plan import StrategyPlan
    from fsdp_engine.planner.strategy_search import plan
    from fsdp_engine.precision import MixedPrecisionPolicy
    from fsdp_engine.pretrained.load import load_pretrained
    from fsdp_engine.pretrained.save import save_pretrained
    from fsdp_engine.pretrained.weight_stream import WeightStream as WeightStream
    from fsdp_engine.pretrained.weight_stream import weight_stream
    from fsdp_engine.pretrained.weight_version import WeightVersion as WeightVersion
    from fsdp_engine.runtime.hooks import register_forward_method
    from fsdp_engine.sharding import shard
    from fsdp_engine.units.granules import whole_rows as whole_rows
    from fsdp_engine.units.granules import whole_tensors as whole_tensors

__version__ = "0.1.0"  # pyproject.toml reads the version of the package from here

# ``from fsdp_engine import *`` imports these names only. Other public names are in ``_LAZY_NAMES``
# and in the list of extensions.
__all__ = [
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Engine",
    "EngineExtension",
    "FlatDTensor",
    "LocalCheckpointer",
    "MixedPrecisionPolicy",
    "Options",
    "StrategyPlan",
    "estimate",
    "export_safetensors",
    "load_checkpoint",
    "load_pretrained",
    "load_safetensors",
    "plan",
    "register_forward_method",
    "save_checkpoint",
    "save_pretrained",
    "shard",
    "shard_optimizer",
    "simulate",
    "weight_stream",
]

# Public names by module. Each is imported at its first use, because the engine needs torch's
# DTensor, whose import takes a second or two.
_LAZY_NAMES = {
    "checkpoint": (
        *("Checkpointer", "LocalCheckpointer", "export_safetensors", "load_checkpoint"),
        *("load_safetensors", "save_checkpoint"),
    ),
    "codecs.base": ("CodecRules",),
    "engine": ("Engine",),
    "engine_extension": ("EngineExtension",),
    "flat_dtensor.tensor": ("FlatDTensor",),
    "options": ("Options",),
    "precision": ("MixedPrecisionPolicy",),
    "runtime.hooks": ("register_forward_method",),
    "sharding": ("shard",),
    "megatron.config": ("DistributedDataParallelConfig",),
    "megatron.distributed_data_parallel": ("DistributedDataParallel",),
    "megatron.finalize_model_grads": ("finalize_model_grads",),
    "megatron.process_groups": ("ModelParallelGroups",),
    "optim.sharded_step": ("shard_optimizer",),
    "planner.estimates": ("Estimate", "estimate"),
    "planner.strategy_plan": ("StrategyPlan",),
    "planner.strategy_search": ("plan",),
    "pretrained.load": ("load_pretrained",),
    "pretrained.save": ("save_pretrained",),
    "pretrained.weight_stream": ("WeightStream", "weight_stream"),
    "pretrained.weight_version": ("WeightVersion",),
    "planner.simulation.causal_lm_stages": ("CausalLMStages",),
    "planner.simulation.machine": ("A100", "B200", "H100", "H200", "Machine", "TwoWayLink"),
    "planner.simulation.pipeline": ("PipelineSimulation", "simulate_pipeline"),
    "planner.simulation.simulate": ("Simulation", "simulate"),
    "planner.simulation.simulation_error": ("SimulationError",),
    "planner.simulation.tp_plan": ("apply_tp_plan",),
    "units.granules": ("whole_rows", "whole_tensors"),
}
_LAZY = {name: f"{__name__}.{module}" for module, names in _LAZY_NAMES.items() for name in names}
_MODULES = {module.name for module in pkgutil.iter_modules(__path__)}

# Deprecated names and their replacements.
_RENAMED = {"Planning": "StrategyPlan"}


def __getattr__(name: str) -> Any:
    """Returns the object of a public or deprecated name, or a module of the package. The first
    call with a name imports its object."""
    if name in _LAZY:
        found = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = found
        return found
    if (extension := find_name(name)) is not None:
        globals()[name] = extension
        return extension
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _RENAMED:
        known = {each.lower(): each for each in names_of("names")}
        hint = f". Did you mean: {known[name.lower()]!r}?" if name.lower() in known else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    warnings.warn(
        f"fsdp_engine.{name} is deprecated and will be removed in 0.3; use "
        f"fsdp_engine.{_RENAMED[name]}",
        DeprecationWarning,
        stacklevel=2,
    )
    return __getattr__(_RENAMED[name])


def __dir__() -> list[str]:
    """Returns the names in ``__all__`` and those of extensions, also before they are imported."""
    return [*__all__, *names_of("names")]
