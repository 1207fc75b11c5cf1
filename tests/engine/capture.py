"""Conditions of a CUDA graph, checked without one: a piece of a step is the same work in every step."""

from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from vllm.utils.torch_utils import LayerName

from tests.pure.test_no_host_sync import NoHostSync
from vllm_adaptive_tree.rng import CounterRNG


class Rehearsal(TorchDispatchMode):
    """Records the operations and kernels that run inside, in their order, with every number and shape, and the address
    of every tensor that was not made inside. A graph may hold it if two steps record the same: a replay repeats the
    numbers, shapes and addresses of the capture. A wait for the device fails at once."""

    def __init__(self, own: set[int]):
        """`own`: storages that graphs before it in the same step have made, of the pool that they share."""
        super().__init__()
        self.own, self.record = own, list[Any]()
        self.kept: list[Any] = []  # or else a later tensor would get an address of these

    def _key(self, value: Any) -> Any:
        if isinstance(value, LayerName):
            return value.value
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage().data_ptr()
        place = "own" if storage in self.own else value.data_ptr()
        return tuple(value.shape), value.stride(), value.dtype, place

    def note(self, name: str, *values: Any) -> None:
        self.record.append((name, *tree_map(self._key, values)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.note(str(func), args, kwargs)
        found = func(*args, **kwargs)
        given = {one.untyped_storage().data_ptr() for one in _tensors((args, kwargs))}
        for one in _tensors(found):
            if (storage := one.untyped_storage().data_ptr()) not in given:
                self.own.add(storage)
                self.kept.append(one)
        return found


def _tensors(tree: Any) -> list[Tensor]:
    """Tensors of a tree of objects, those of random sources included, which are plain objects."""
    leaves = tree_leaves(tree)
    leaves += [part for one in leaves if isinstance(one, CounterRNG) for part in vars(one).values()]
    return [one for one in leaves if isinstance(one, Tensor)]


class Pieces:
    """Rehearses calls of an engine by name; `graphs`: name -> the record of each call, with its key."""

    def __init__(self, monkeypatch: Any):
        self.monkeypatch, self.graphs = monkeypatch, dict[str, list[tuple[Any, list[Any]]]]()
        self.active: Rehearsal | None = None
        self.own: set[int] = set()
        self.kept: list[Any] = []
        self._watch_kernels()

    def _watch_kernels(self) -> None:
        """Watch launches of kernels: Triton's interpreter runs one by operations of its own, which are no launches."""
        from triton.runtime import interpreter

        pieces, original = self, interpreter.GridExecutor.__call__

        def run(executor: Any, *args: Any, **kwargs: Any) -> Any:
            active, pieces.active = pieces.active, None
            if active is None:
                return original(executor, *args, **kwargs)
            active.note(executor.fn.__name__, executor.grid, args, kwargs)
            with _disable_current_modes():
                found = original(executor, *args, **kwargs)
            pieces.active = active
            return found

        self.monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)

    def new_step(self) -> None:
        self.own, self.kept = set(), []

    @contextmanager
    def piece(self, name: str, key: Any) -> Any:
        rehearsal = self.active = Rehearsal(self.own)
        with NoHostSync(), rehearsal:
            yield
        self.active = None
        self.kept += rehearsal.kept
        self.graphs.setdefault(name, []).append((key, rehearsal.record))

    def hold(self, owner: Any, name: str, key: Any) -> None:
        """Rehearse every call of `owner.name`; `key`: of its arguments, those with a graph of their own."""
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.piece(name, key(*args, **kwargs)):
                return original(*args, **kwargs)

        self.monkeypatch.setattr(owner, name, run)

    def inside(self, owner: Any, name: str) -> None:
        """Rehearse `owner.name`, which runs in an operation of vLLM's, in which modes are off."""
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.active or nullcontext():
                return original(*args, **kwargs)

        self.monkeypatch.setattr(owner, name, run)
