import pytest, torch, dataclasses
import fsdp_engine as fe
from typing import Any
from tests.async_device.test_offloaded_state import *
H="host"
KINDS={"wg": fe.Offload(main_weights=H, gradients=H), "all": fe.Offload(H, main_weights=H, gradients=H), "hoststep": fe.Offload(H, main_weights=H, gradients=H, step_on=H)}
BF16 = fe.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mp", [None, BF16], ids=["fp32","bf16"])
@pytest.mark.parametrize("micro", [1,2])
@on_ranks(2)
def test_x(kind: str, mp: Any, micro:int) -> None:
    opts = (("offload", KINDS[kind]),) + ((("mp_policy", mp),) if mp else ())
    j = Job(pair=("optim_grads_params","no_shard"), options=opts, make_optimizer=make_adamw, num_micro=micro, sizes=(2,))
    for seed in range(2):
        d=compare(j, seed=seed); assert not d, str(d)[:1500]

@on_ranks(2)
def test_base() -> None:
    j = Job(pair=("optim_grads_params","no_shard"), options=(), make_optimizer=make_adamw, num_micro=2, sizes=(2,))
    d=compare(j, seed=0); assert not d, str(d)[:300]

@on_ranks(2)
def test_noclip() -> None:
    j = Job(pair=("optim_grads_params","no_shard"), options=(("offload", KINDS["wg"]),), make_optimizer=make_adamw, num_micro=2, sizes=(2,), clips=False)
    d=compare(j, seed=0); assert not d, str(d)[:300]

@on_ranks(2)
def test_names() -> None:
    from fsdp_engine.comm.groups import name_of_backend
    m = Transformer(2).to(on.NAME)
    e = fe.shard(m)
    g = e.ranks.control_group
    raise ValueError(f"{name_of_backend(g, torch.device('cpu'))!r} {name_of_backend(g, e.mesh.device)!r} {name_of_backend(e.mesh.inner.gather_group, torch.device('cpu'))!r}")
