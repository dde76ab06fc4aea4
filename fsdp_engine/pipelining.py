"""Stages of ``torch.distributed.pipelining`` whose modules are sharded."""

from fsdp_engine.extensions.pipelines.pipeline_stage import PipelineStage

__all__ = ["PipelineStage"]
