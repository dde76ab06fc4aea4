"""A sharded training engine for PyTorch: one core for DDP, ZeRO-1/2/3, HSDP and HFSDP."""

from fsdp_engine.adapters import AdapterLayers
from fsdp_engine.checkpoint import (
    Checkpointer,
    export_safetensors,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from fsdp_engine.codecs import Float8
from fsdp_engine.config import DistributedDataParallelConfig
from fsdp_engine.engine import Engine
from fsdp_engine.export.stream import WeightStream, weight_stream
from fsdp_engine.export.version import WeightVersion
from fsdp_engine.flat_dtensor import FlatDTensor
from fsdp_engine.megatron.distributed_data_parallel import DistributedDataParallel
from fsdp_engine.megatron.finalize_model_grads import finalize_model_grads
from fsdp_engine.megatron.groups import ModelParallelGroups
from fsdp_engine.optimizer import shard_optimizer
from fsdp_engine.planner.estimates import Estimate, estimate
from fsdp_engine.planner.plan import plan
from fsdp_engine.planner.planning import Planning
from fsdp_engine.planning.adapter_layers import register_adapter_layers
from fsdp_engine.planning.checkpointing import checkpoint_units
from fsdp_engine.precision import MixedPrecisionPolicy
from fsdp_engine.pretrained.load import load_pretrained
from fsdp_engine.pretrained.save import save_pretrained
from fsdp_engine.runtime.hooks import register_forward_method
from fsdp_engine.sharding import shard
from fsdp_engine.simulation.errors import SimulationError
from fsdp_engine.simulation.machine import A100, B200, H100, H200, Machine
from fsdp_engine.simulation.result import Simulation
from fsdp_engine.simulation.simulate import simulate

__version__ = "0.1.0"  # the package's metadata read it here

__all__ = [
    "A100",
    "B200",
    "H100",
    "H200",
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Engine",
    "Estimate",
    "FlatDTensor",
    "Float8",
    "Machine",
    "MixedPrecisionPolicy",
    "ModelParallelGroups",
    "Planning",
    "Simulation",
    "SimulationError",
    "WeightStream",
    "WeightVersion",
    "checkpoint_units",
    "estimate",
    "export_safetensors",
    "finalize_model_grads",
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

# Materialization of meta parameters initializes the adapters of PEFT.
register_adapter_layers(AdapterLayers)
