"""The line of the user's code in warnings, and in errors about ranks that wait."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
import threading
import warnings
from typing import Any

import torch
from torch import nn

import fsdp_engine as fe
from fsdp_engine.callers import user_frame
from fsdp_engine.flat_dtensor import gathered_functions, tensor
from tests.pool import on_ranks


def _linear() -> nn.Module:
    model = nn.Linear(8, 5)
    fe.shard(model, strategy="optim_grads_params")
    return model


def test_the_user_frame_is_outside_of_python_torch_and_the_package() -> None:
    ends = threading.Event()
    thread = threading.Thread(target=lambda: ends.wait(60))
    thread.start()
    try:
        frame: Any = sys._current_frames()[thread.ident or 0]
        assert frame.f_code.co_filename != __file__
        found = user_frame(frame)
        assert found is not None
        assert found.f_code.co_filename == __file__
    finally:
        ends.set()
        thread.join()


@on_ranks(2)
def test_a_warning_about_a_gather_names_the_users_line() -> None:
    param: Any = _linear().weight
    gathered_functions._warned.clear()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        param.norm(dim=1)
        torch.cat([param, param])
    assert [each.filename for each in shown] == [__file__] * 2


@on_ranks(2)
def test_a_pickle_of_a_part_of_a_tensor_warns_once() -> None:
    model = _linear()
    tensor._warned_of_pickle = False
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        copied = copy.copy(model.weight.detach())
        assert torch.equal(copied.to_local(), model.weight.to_local())
        copy.deepcopy(model.state_dict())
        assert not shown
        for _ in range(2):
            torch.save(model.state_dict(), io.BytesIO())
    assert [each.filename for each in shown] == [__file__]
    text = str(shown[0].message)
    of_state = "or of optimizer state of it: only this rank's elements"
    assert re.search(rf"torch\.save of (weight|bias), {of_state} \[", text), text


@on_ranks(2)
def test_a_pickle_of_a_full_tensor_does_not_warn() -> None:
    model = nn.Linear(8, 5)
    fe.shard(model, strategy="no_shard")
    tensor._warned_of_pickle = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.dumps(model.state_dict())
