"""Every public method of ``torch.Tensor``, and every function of torch that takes tensors.

They are found by introspection and tried with all arguments that plain torch accepts, on tensors of
several kinds, cut in the middle. A name for which no arguments fit must be in ``NOT_HERE``.

A trial compares the result, the tensor itself afterwards, what a change of the result does to it
(views), and the gradient where autograd follows.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import get_overridable_functions

from fsdp_engine.flat_dtensor import FlatDTensor, FlatPlacement, functions
from fsdp_engine.flat_dtensor.elementwise import elementwise
from fsdp_engine.flat_dtensor.slices import refuse
from tests.promises.trial import Difference, Outcome, Verdict, compare, judge, outcome_of

# Elements that the first of two ranks holds; no multiple of a row.
CUT = 17

_OPERATORS = frozenset(
    """
    abs add and bool complex contains float floordiv getitem iadd iand ifloordiv ilshift imod imul
    index int invert ior ipow irshift isub iter itruediv ixor len lshift matmul mod mul neg or pos
    pow radd rand rdiv rfloordiv rlshift rmatmul rmod rmul ror rpow rrshift rshift rsub rtruediv
    rxor setitem sub truediv xor eq ne lt le gt ge repr format hash reversed array
    """.split()  # noqa: SIM905
)

# What cannot be tried: names, and why.
NOT_HERE: dict[str, str] = {
    "another device or backend": r"""
        cuda ipu xpu mtia to_mkldnn pin_memory is_pinned record_stream cudnn_.* miopen_.*
        mkldnn_.* .*_cuda.* _?cufft.* q_.* qscheme int_repr dequantize quantize.* fake_quantize.*
        choose_qparams.*         quantized_.* fbgemm_.* .*mps.* sym_.* fused_moving.* hspmm
    """,
    "sparse, nested or named tensors": r"""
        ccol_indices col_indices crow_indices row_indices indices values coalesce is_coalesced
        dense_dim sparse_dim sparse_.* to_padded_tensor resize_as_sparse_ .*names? align_.*
        refine_names rename_? nested_.* smm sspaddmm sparse_mask slice_inverse saddmm has_names
    """,
    "taken out of torch": "eig lstsq symeig solve reinforce lu_solve volatile name",
    "no method of a whole tensor": r"""
        istft stft embedding_renorm_ module_load rnn_.* gru.* lstm.* .*_cell multi_head_attention.*
        ctc_loss grid_sample.* affine_grid.* grid_sampler.* channel_shuffle.* pixel_.*shuffle.*
        fold index max_unpool.* binary_cross_entropy_with_logits result_type can_cast
        promote_types convolution conv_.* chain_matmul einsum get_device as_subclass ormqr
        float_power_ native_dropout bincount addmv_? baddbmm_? bmm imag
    """,
}


@dataclass
class Kit:
    """What a trial may use: the same values, whole in plain torch, or this rank's slices."""

    make: Callable[[Tensor], Tensor]  # from a whole tensor

    def subject(self, kind: str) -> Tensor:
        """A new tensor to be tried, of one of ``SUBJECTS``."""
        tensor = self.make(SUBJECTS[kind].clone())
        return nn.Parameter(tensor) if kind.startswith("parameter") else tensor


def _matrix() -> Tensor:
    """(6, 6), positive definite, elements in (0, 1): nearly every function is defined for it."""
    values = torch.arange(36.0).reshape(6, 6) / 400
    return (values + values.T) / 2 + torch.eye(6) * 0.5 + 0.01


SUBJECTS: dict[str, Tensor] = {
    "parameter": _matrix(),
    "parameter, no_grad": _matrix(),
    "gradient": _matrix(),
    "integers": (torch.arange(36) % 7 + 1).reshape(6, 6),
    "mask": (torch.arange(36) % 3 == 0).reshape(6, 6),
    "scalar": torch.tensor(0.5),
    "vector": _matrix().reshape(36),
    "cube": _matrix().reshape(3, 2, 6),
    "count": torch.tensor(3),
    "pairs": _matrix().reshape(18, 2),
    "complex": torch.view_as_complex(_matrix().reshape(18, 2)),
}
# Tried where no other kind of subject fits.
_RARE = ("vector", "cube", "count", "pairs", "complex")
_SHIFT = torch.arange(36.0).reshape(6, 6) % 5 / 10 + 0.1
_INDEX = torch.tensor([1, 0, 3])


def _fits(x: Tensor) -> Tensor:
    """A whole tensor of another value, of the shape and dtype of ``x``."""
    if x.ndim == 0:
        return torch.tensor(0.25)
    if x.dtype == torch.bool:
        return (torch.arange(36) % 2 == 0).reshape(6, 6)
    values = (_SHIFT * 20).long() if not x.is_floating_point() else _SHIFT
    return values.to(x.dtype).reshape(x.shape)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Way = Callable[[Kit, Tensor], Arguments]


def _after(*args: Any, **kwargs: Any) -> Way:
    """``x`` and then these arguments; those in ``_MADE`` are called with the kit and ``x``."""

    def made(value: Any, kit: Kit, x: Tensor) -> Any:
        return value(kit, x) if id(value) in _MADE else value

    def way(kit: Kit, x: Tensor) -> Arguments:
        rest = [made(value, kit, x) for value in args]
        return (x, *rest), {key: made(value, kit, x) for key, value in kwargs.items()}

    return way


def _each(*lists: tuple[Any, ...]) -> list[Way]:
    """A way for each list of arguments after ``x``."""
    return [_after(*args) for args in lists]


def _other(kit: Kit, x: Tensor) -> Tensor:
    return kit.make(_fits(x).clone())


def _mask(kit: Kit, x: Tensor) -> Tensor:
    return kit.make((torch.arange(x.numel()) % 2 == 0).reshape(x.shape))


def _whole(kit: Kit, x: Tensor) -> Tensor:
    return _fits(x).clone()


def _parameter(kit: Kit, x: Tensor) -> Tensor:
    return nn.Parameter(_other(kit, x))


_MADE = {id(each) for each in (_other, _mask, _whole, _parameter)}
_FEW = torch.ones(3, 6)

_FLOAT64 = torch.ones(6, 6, dtype=torch.float64)
_ONE, _TWO, _WIDE = torch.ones(6), torch.ones(6, 2), torch.ones(1, 6, 6)
_ROWS = _INDEX.expand(6, 3)
# Tried on every kind of subject.
_SIMPLE: list[Way] = [
    *_each((), (2,), (0,), (0, 1), (_other,), (_whole,), (_mask,), (_mask, 1), (_mask, _other)),
    *_each((torch.tensor(2.0),), (torch.tensor(2),), (torch.float64,)),
    _after(dim=0),
]
# For functions that run on slices element by element, these replace ``_MORE``.
_ELEMENTWISE = _each((0.5,), (_other, _other), (_other, 0.5), (0.2, 0.4), (_ONE,))
# Tried on tensors of floating point with dims.
_MORE: list[Way] = [
    *_ELEMENTWISE,
    *_each((-1,), (0, 1, 2), (0, 0, 1), (36,), (3, 12), (1.0, 0, 5.0), (1,), (2.0,), (0.5, True)),
    *_each(("cpu",), ("fro",), ("",), (float("inf"),), (5, 0.0, 1.0), ([1, 1],), ([2, 4],)),
    *_each(((36,),), ((6, 6),), ((6, 1, 6),), ((6, 6), (6, 1)), ((2, 6, 6),), ((1, 0),), ((2, 2),)),
    *_each(((2, 3), 0), (0, (2, 3)), ((slice(1, 3), 2),), ((_INDEX,), _FEW), ((0, 0), 1.0)),
    *_each(((_INDEX, slice(None)),), ((slice(None), 1), 2.0), (_INDEX,), (_INDEX, torch.ones(3))),
    *_each((0, _INDEX), (0, _INDEX, _FEW), (0, _INDEX, 2.0), (0, _INDEX, _FEW, "amax"), (0, _ROWS)),
    *_each((0, _ROWS.T, _FEW), (0, _ROWS, _FEW.T, "sum"), (_mask, 0.5), (_mask, torch.ones(36))),
    *_each((_ONE, _ONE), (_TWO,), (_TWO, _TWO.T), (_ONE, 0, 1), (_FLOAT64,), (_WIDE, _WIDE)),
    *_each((torch.ones(2, 2), (2, 2), (6, 1)), (torch.ones(6, 6), _ONE), (torch.ones(3, 6, 2),)),
    *_each((torch.ones(3, 2, 6), torch.ones(3, 6, 6)), (_parameter,), (lambda value: value + 1,)),
    *_each((_whole, lambda one, two: one + two)),
    *_each((_whole, _whole, lambda one, two, three: one + two + three)),
    *(_after(dim=0, keepdim=True), _after(dim=(0, 1)), _after(dtype=torch.float64)),
    *(_after(min=0.2), _after(size=4)),
]
# Tried with functions: the tensor is in a list, or another argument comes first.
_FUNCTIONS: list[Way] = [
    lambda kit, x: (([x, _other(kit, x)],), {}),
    lambda kit, x: (([x, _other(kit, x)], 1), {}),
    lambda kit, x: ((_mask(kit, x), x, _other(kit, x)), {}),
    lambda kit, x: ((_mask(kit, x), x, 0.5), {}),
    lambda kit, x: ((0.5, x), {}),
    lambda kit, x: ((_INDEX, x), {}),
    lambda kit, x: ((torch.ones(2, 6), x), {}),
    lambda kit, x: ((torch.ones(2, 6), x, torch.ones(6)), {}),
    lambda kit, x: ((torch.ones(2, 6), (6,), x[0].detach() if type(x) is Tensor else x), {}),
    lambda kit, x: ((torch.ones(2, 6, 3), x), {}),
    lambda kit, x: ((_other(kit, x), x), {}),
]


def _ways(name: str, kind: str) -> list[Way]:
    ways = list(_SIMPLE)
    if kind in {"parameter", "parameter, no_grad", "gradient"}:
        ways += _ELEMENTWISE if _handler(name) is elementwise else _MORE
    if not name.startswith("Tensor."):
        ways += _FUNCTIONS
    return ways


def _handler(name: str) -> Any:
    method = getattr(torch.Tensor, name.removeprefix("Tensor."), None)
    return None if method is None else functions.handler_of(method)


# Pointers and storages are of this rank's slice by their nature.
OF_THE_SLICE = frozenset(
    """
    data_ptr const_data_ptr storage untyped_storage storage_offset stride storage_type is_shared
    share_memory_ is_set_to layout __hash__ __repr__ __format__ __dlpack__ __array__ is_contiguous
    dim_order
    """.split()  # noqa: SIM905
)


# Functions that return uninitialised memory.
EMPTY = frozenset({"new_empty", "new_empty_strided", "new", "empty_like", "resize_", "resize_as_"})


def public_names() -> dict[str, Callable[..., Any]]:
    """Everything that is tried, by name, as a function whose first argument is the tensor."""
    found: dict[str, Callable[..., Any]] = {}
    for name in dir(torch.Tensor):
        if name.startswith("_"):
            continue
        value = getattr(torch.Tensor, name)
        if callable(value):
            found[f"Tensor.{name}"] = _method(name)
        else:
            found[f"Tensor.{name}"] = operator.attrgetter(name)
    for name in sorted(_OPERATORS):
        if hasattr(torch.Tensor, f"__{name}__"):
            found[f"Tensor.__{name}__"] = _method(f"__{name}__")
    spaces = {
        torch: "torch",
        torch.functional: "torch",
        nn.functional: "F",
        torch.linalg: "linalg",
        torch.special: "special",
        torch.fft: "fft",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overridable = get_overridable_functions()
    for space, short in spaces.items():
        for function in overridable.get(space, ()):
            name = getattr(function, "__name__", "")
            name = re.sub(f"^({short}_|_)(?=[a-z])", "", name) if space is not torch else name
            # The method of this name, which takes the same path, is tried already. Functions that
            # functions.py does not list always raise.
            known = not name or name[0] == "_" or f"Tensor.{name}" in found
            if not known and hasattr(space, name) and not is_refused(function):
                found[f"{short}.{name}"] = function
    return found


def _method(name: str) -> Callable[..., Any]:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, name)(*args, **kwargs)

    return call


def reason_not_here(name: str) -> str | None:
    """Why ``name`` cannot be tried, if so."""
    short = name.split(".")[-1]
    for reason, patterns in NOT_HERE.items():
        if any(re.fullmatch(pattern, short) for pattern in patterns.split()):
            return reason
    return None


def kits(mesh: DeviceMesh) -> tuple[Kit, Kit]:
    """The kit of plain torch and that of this rank's slices."""
    rank = mesh.get_local_rank()

    def make(whole: Tensor) -> Tensor:
        numel = whole.numel()
        bounds = (0, min(CUT, numel), numel)
        start, stop = bounds[rank], bounds[rank + 1]
        placement = FlatPlacement.on_mesh(whole.shape, start, stop, mesh, 1)
        local = whole.detach().reshape(-1)[start:stop].clone()
        return FlatDTensor.from_flat_local(local, placement)

    return Kit(lambda whole: whole.clone()), Kit(make)


@dataclass
class _Run:
    """One call and all that can be seen of it."""

    result: Any
    subject: Any
    gradient: Any
    is_subject: bool


def _run(function: Any, kit: Kit, kind: str, way: Way) -> _Run:
    x = kit.subject(kind)
    torch.default_generator.manual_seed(0)
    args, kwargs = way(kit, x)
    with torch.set_grad_enabled(kind != "parameter, no_grad"):
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = list(result)
    return _Run(result, x, None, result is x)


def _with_gradient(run: _Run) -> _Run:
    if isinstance(run.result, Tensor) and run.result.requires_grad:
        run.result.square().sum().backward()
        run.gradient = run.subject.grad
    return run


def _with_change(run: _Run) -> _Run:
    """Changes the result; where it is a view, the subject changes with it."""
    result = run.result
    if isinstance(result, Tensor) and result.dtype == torch.float32 and result is not run.subject:
        with torch.no_grad():
            result.mul_(2)
    return run


def is_refused(function: Any) -> bool:
    """Whether all calls of a function with a FlatDTensor raise, whatever the arguments."""
    return functions.handler_of(function) is refuse


def fitting(name: str, function: Any, plain: Kit) -> dict[str, list[int]]:
    """Ways that plain torch accepts, by kind of subject; for a refused function, the first one."""
    found: dict[str, list[int]] = {kind: [] for kind in SUBJECTS}
    refused = is_refused(getattr(torch.Tensor, name.removeprefix("Tensor."), function))
    for kind in ("gradient", "integers", "mask", "scalar", *_RARE, "parameter"):
        if kind in (*_RARE, "parameter") and any(found.values()):
            break
        for number, way in enumerate(_ways(name, kind)):
            if outcome_of(partial(_run, function, plain, kind, way))[1] is None:
                found[kind].append(number)
                if refused:
                    return found
    found["parameter"] = found["parameter"] or found["gradient"]
    if name[-1] == "_":  # in place
        found["parameter, no_grad"] = found["parameter"]
    return found


def try_name(
    name: str, function: Any, plain: Kit, ours: Kit, fits: dict[str, list[int]]
) -> list[tuple[str, Outcome]]:
    """Outcomes of all arguments that fit, each with its arguments."""
    outcomes: list[tuple[str, Outcome]] = []
    last = name.split(".")[-1]
    for kind in SUBJECTS:
        ways = _ways(name, kind)
        for way in (ways[number] for number in fits[kind]):
            expected = outcome_of(partial(_run, function, plain, kind, way))
            if expected[1] is None:
                found = outcome_of(partial(_run, function, ours, kind, way))
                outcome = _judge(last, kind, expected, found)
                wrong = outcome.verdict is Verdict.WRONG
                shown = _shown(way(plain, SUBJECTS[kind])) if wrong else ""
                outcomes.append((f"{kind}: {shown}", outcome))
    return outcomes


def _judge(last: str, kind: str, expected: Any, found: Any) -> Outcome:
    if last in OF_THE_SLICE:
        if found[1] is not None:
            return judge((None, None), found)
        return Outcome(Verdict.RIGHT, "of this rank's slice")
    if last in EMPTY:
        for each in (expected, found):
            if each[0] is not None and isinstance(each[0].result, Tensor):
                with torch.no_grad():
                    each[0].result.zero_()
    for step in (lambda run: run, _with_gradient if kind == "parameter" else _with_change):
        if expected[1] is None:
            expected = outcome_of(lambda: step(expected[0]))  # noqa: B023
        if expected[1] is not None:
            return Outcome(Verdict.RIGHT)  # the result was compared; torch refuses this step
        if found[1] is None:
            found = outcome_of(lambda: step(found[0]))  # noqa: B023
        if found[1] is not None:
            return judge((None, None), found)
        try:
            for name in ("result", "subject", "gradient"):
                compare(getattr(found[0], name), getattr(expected[0], name), name)
            if expected[0].is_subject and not found[0].is_subject:
                raise Difference("another tensor is returned than the one that was changed")
        except Difference as difference:
            return Outcome(Verdict.WRONG, str(difference))
    return Outcome(Verdict.RIGHT)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"T{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_shown, value)) + ")"
    return str(value) if not callable(value) or isinstance(value, type) else "f"


def try_all(mesh: DeviceMesh) -> dict[str, list[tuple[str, Outcome]]]:
    """Outcomes by name. Every rank must call alike."""
    plain, ours = kits(mesh)
    tried = public_names()
    chosen = [name for name in tried if reason_not_here(name) is None]
    rank, size = mesh.get_local_rank(), mesh.size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Calls that torch refuses take most of the time, so each rank tries a part of the names.
        mine = {name: fitting(name, tried[name], plain) for name in chosen[rank::size]}
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, mine, group=mesh.get_group())
        fits = {name: found for part in parts for name, found in part.items()}
        return {name: try_name(name, tried[name], plain, ours, fits[name]) for name in chosen}
