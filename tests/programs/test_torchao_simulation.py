"""Simulated and planned steps of models with torchao's float8 linears."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fsdp_engine as fe
from fsdp_engine.planner.planner_cli import app
from tests.programs.packages import ONLY_TORCHAO, with_torchao

pytestmark = ONLY_TORCHAO
WIDTH, BLOCKS, ROWS = 8192, 3, 32768
KINDS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "gathered in fp8")
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class _Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _builder(kind: str | None) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = _Tower()
        if kind is None:
            return model
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if kind == "gathered in fp8":
            config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        else:
            config = Float8LinearConfig.from_recipe_name(kind)
        return convert_to_float8_training(model, config=config)

    return build


def _simulated(kind: str | None, machine: fe.Machine = fe.H100) -> fe.Simulation:
    with with_torchao():
        return fe.simulate(
            _builder(kind),
            8,
            batch=torch.zeros(ROWS, dtype=torch.long),
            machine=machine,
            strategy="optim_grads_params",
            mp_policy=BF16,
        )


def _seconds(found: fe.Simulation, label: str) -> float:
    return sum(each.end - each.start for each in found.spans if each.label == label)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_in_fp8_and_casts_take_time(kind: str) -> None:
    plain, found = _simulated(None), _simulated(kind)
    assert found.model_flops == plain.model_flops
    # All three products of a layer; "gw_hp" computes the weight's gradient in bf16.
    in_bf16 = 1 / 3 if kind == "rowwise_with_gw_hp" else 0.0
    products, flops = _seconds(plain, "mm"), fe.H100.processor.matrix_flops
    faster = flops[torch.float8_e4m3fn] / flops[torch.bfloat16]
    assert _seconds(found, "mm") == pytest.approx(in_bf16 * products, rel=0.01)
    in_fp8 = (1 - in_bf16) * products / faster
    assert _seconds(found, "_scaled_mm") == pytest.approx(in_fp8, rel=0.01)
    assert _seconds(found, "_to_copy") > _seconds(plain, "_to_copy")


def test_a_machine_without_fp8_raises() -> None:
    with pytest.raises(fe.SimulationError, match=r"expected matrix_flops of torch\.float8_e4m3fn"):
        _simulated("tensorwise", fe.A100)


def test_a_converted_model_is_planned() -> None:
    with with_torchao():
        planning = fe.plan(
            _builder("tensorwise"),
            torch.zeros(ROWS, dtype=torch.long),
            world_size=8,
            machine="h100",
            mp_policy=BF16,
        )
    assert planning.best is not None


def test_the_command_line_converts_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 1024}
    names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **heads, **names}))
    monkeypatch.chdir(tmp_path)
    arguments = "plan --world 8 --model config.json --batch 4x4096 --no-cache --save"
    rates = {}
    with with_torchao():
        for name, options in (("bf16.json", []), ("fp8.json", ["--fp8"])):
            result = CliRunner().invoke(app, [*arguments.split(), name, *options])
            assert result.exit_code == 0, result.output
            chosen = fe.StrategyPlan.load(name).chosen
            assert chosen is not None
            rates[name] = chosen.rate
    assert rates["fp8.json"] > 1.1 * rates["bf16.json"]
