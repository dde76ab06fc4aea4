"""``PipelineStage``, a stage of ``torch.distributed.pipelining`` whose module is sharded."""

from fsdp_engine.extensions.pipelines.pipeline_stage import PipelineStage

__all__ = ["PipelineStage"]
