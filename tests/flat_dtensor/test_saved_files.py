"""State dicts that ``torch.save`` wrote with earlier versions.

There is a file for each of two ranks. ``dp``: a ``Linear(2, 4)`` after ``fully_shard``. ``tp``: the
same layer, its rows sharded over two tensor-parallel ranks. Weights are 0 to 7, biases 0 to 3.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import init_device_mesh

from tests.pool import on_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(_mesh_layout, "_FlatLayout"),
    reason="the files contain meshes of torch 2.13, which an older torch does not load",
)
FOLDER = Path(__file__).parent / "saved_before_0_1_0"


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", ["dp", "tp"])
@on_ranks(2)
def test_state_dicts_of_earlier_versions_load(kind: str, weights_only: bool) -> None:
    # A program that loads such files has made its mesh before.
    init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    path = FOLDER / f"{kind}.{dist.get_rank()}.pt"
    state = torch.load(path, weights_only=weights_only)
    assert torch.equal(state["weight"].full_tensor(), torch.arange(8.0).view(4, 2))
    assert torch.equal(state["bias"].full_tensor(), torch.arange(4.0))
