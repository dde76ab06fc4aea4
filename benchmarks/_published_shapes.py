"""Parameter shapes of published models, by unit, without weights.

A model consists of a number of units of each kind: its blocks, and a root with embedding, final
norm and head. Experts are fused into one tensor per layer: (experts, 2 * intermediate, hidden) and
(experts, hidden, intermediate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class UnitKind:
    """Shapes of a unit, and the number of such units in a model."""

    name: str
    count: int
    shapes: Shapes

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


@dataclass(frozen=True)
class Model:
    """A published model: its units, and its published number of parameters."""

    name: str
    published_billions: float
    units: tuple[UnitKind, ...]

    def __post_init__(self) -> None:
        found = self.num_elements / 1e9
        assert abs(found / self.published_billions - 1) < 0.01, (self.name, found)

    @property
    def num_elements(self) -> int:
        return sum(unit.count * unit.num_elements for unit in self.units)


def llama(name: str, billions: float, layers: int, hidden: int, inter: int) -> Model:
    kv = 8 * 128
    block: Shapes = {
        "input_norm": (hidden,),
        "q": (hidden, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, hidden),
        "post_norm": (hidden,),
        "gate": (inter, hidden),
        "up": (inter, hidden),
        "down": (hidden, inter),
    }
    vocabulary = (128256, hidden)
    root: Shapes = {"embedding": vocabulary, "norm": (hidden,), "head": vocabulary}
    units = (UnitKind("block", layers, block), UnitKind("root", 1, root))
    return Model(name, billions, units)


def qwen3_4b() -> Model:
    hidden, inter, q, kv = 2560, 9728, 32 * 128, 8 * 128
    block: Shapes = {
        "input_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "q_norm": (128,),
        "k_norm": (128,),
        "o": (hidden, q),
        "post_norm": (hidden,),
        "gate": (inter, hidden),
        "up": (inter, hidden),
        "down": (hidden, inter),
    }
    root: Shapes = {"embedding": (151936, hidden), "norm": (hidden,)}  # the head is tied
    units = (UnitKind("block", 36, block), UnitKind("root", 1, root))
    return Model("Qwen3-4B", 4.0, units)


def gpt_oss_120b() -> Model:
    hidden, inter, experts, q, kv = 2880, 2880, 128, 64 * 64, 8 * 64
    block: Shapes = {
        "input_norm": (hidden,),
        "q": (q, hidden),
        "q_bias": (q,),
        "k": (kv, hidden),
        "k_bias": (kv,),
        "v": (kv, hidden),
        "v_bias": (kv,),
        "o": (hidden, q),
        "o_bias": (hidden,),
        "sinks": (64,),
        "post_norm": (hidden,),
        "router": (experts, hidden),
        "router_bias": (experts,),
        "gate_up": (experts, 2 * inter, hidden),
        "gate_up_bias": (experts, 2 * inter),
        "down": (experts, hidden, inter),
        "down_bias": (experts, hidden),
    }
    vocabulary = (201088, hidden)
    root: Shapes = {"embedding": vocabulary, "norm": (hidden,), "head": vocabulary}
    units = (UnitKind("block", 36, block), UnitKind("root", 1, root))
    return Model("GPT-OSS-120B", 116.8, units)


def deepseek_v3() -> Model:
    hidden, heads, q_lora, kv_lora = 7168, 128, 1536, 512
    attention: Shapes = {
        "input_norm": (hidden,),
        "q_a": (q_lora, hidden),
        "q_a_norm": (q_lora,),
        "q_b": (heads * (128 + 64), q_lora),
        "kv_a": (kv_lora + 64, hidden),
        "kv_a_norm": (kv_lora,),
        "kv_b": (heads * (128 + 128), kv_lora),
        "o": (hidden, heads * 128),
        "post_norm": (hidden,),
    }
    dense: Shapes = {"gate": (18432, hidden), "up": (18432, hidden), "down": (hidden, 18432)}
    experts: Shapes = {
        "router": (256, hidden),
        "router_bias": (256,),
        "gate_up": (256, 2 * 2048, hidden),
        "down": (256, hidden, 2048),
        "shared_gate": (2048, hidden),
        "shared_up": (2048, hidden),
        "shared_down": (hidden, 2048),
    }
    vocabulary = (129280, hidden)
    units = (
        UnitKind("dense block", 3, attention | dense),
        UnitKind("block", 58, attention | experts),
        UnitKind("root", 1, {"embedding": vocabulary, "norm": (hidden,), "head": vocabulary}),
    )
    return Model("DeepSeek-V3", 671, units)  # without the extra prediction layer


MODELS = (
    llama("Llama-3 8B", 8.03, 32, 4096, 14336),
    llama("Llama-3 70B", 70.6, 80, 8192, 28672),
    qwen3_4b(),
    gpt_oss_120b(),
    deepseek_v3(),
)
