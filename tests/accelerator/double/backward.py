"""A backward as on several GPUs: a thread for each device, which knows nothing of who asked for it.

autograd has a thread for each device, for the life of the process. Such a thread has what torch keeps for a thread, put
in place from the caller, and none of Python's context variables. Where multithreading is switched off, the backward
runs in the thread that asked, and nodes of any device in it; then the current device is still that of each node.
"""

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from fdp._execution.thread_state import ThreadState
from fdp._trees import torch_private
from fdp.testing import _virtual_device as virtual
from fdp.testing._virtual_tensor import VirtualTensor
from tests.accelerator.double import streams

Result = Sequence[torch.Tensor | None]
_is_legacy_batched: Any = torch_private.find("torch._C._functorch.is_legacy_batchedtensor")


class _Here(threading.local):
    is_device_thread = False


_HERE = _Here()


def install() -> None:
    """Replace how torch runs a backward."""
    run_here = torch.autograd.graph._engine_run_backward  # that of the plain accelerator: it runs in this thread

    @functools.wraps(run_here)
    def run(roots: Any, given: Any, keep: bool, create: bool, inputs: Any = (), *args: Any, **kwargs: Any) -> Any:
        whole = functools.partial(run_here, roots, given, keep, create, inputs, *args, **kwargs)
        with streams.all_wait():
            if not _has_threads(roots):
                return whole()
            groups = _by_device(roots, given, inputs)
            if len(groups) < 2:
                return _in_threads([whole], [_device(roots[0])])[0]
            names = ("allow_unreachable", "accumulate_grad")
            accumulates = dict(zip(names, args, strict=False)).get("accumulate_grad", kwargs.get("accumulate_grad"))
            calls = [
                functools.partial(run_here, *group, keep, create, inputs, True, accumulates)
                for group in groups.values()
            ]
            return _joined(_in_threads(calls, list(groups)), inputs, whole)

    modules: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
    for module in modules:
        module._engine_run_backward = run
    _follow_devices()


def _has_threads(roots: Any) -> bool:
    if _HERE.is_device_thread or not torch_private.is_multithreading_enabled():
        return False
    if torch_private.is_transformed() or any(map(_is_legacy_batched, roots)):
        return False
    return any(x.device.type == virtual.NAME for x in roots)


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.device


def _by_device(roots: Any, given: Any, inputs: Any) -> dict[torch.device, tuple[Any, Any]]:
    """The roots of each device, if no two devices share a node: else autograd is to order what they share."""
    devices = list(dict.fromkeys(map(_device, roots)))
    groups: dict[torch.device, tuple[Any, Any]] = {}
    for device in devices:
        pairs = [(x, g) for x, g in zip(roots, given, strict=True) if x.device == device]
        groups[device] = tuple(x for x, _ in pairs), tuple(g for _, g in pairs)
    nodes = [_nodes(group[0]) for group in groups.values()]
    if any(a & b for i, a in enumerate(nodes) for b in nodes[:i]):
        return {}
    return groups


def _nodes(roots: Sequence[torch.Tensor]) -> set[Any]:
    """What a backward from here visits, but for leaves."""
    found: set[Any] = set()
    left: list[Any] = [x.grad_fn for x in roots]
    while left:
        node = left.pop()
        if node is not None and node not in found and not hasattr(node, "variable"):
            found.add(node)
            left += [other for other, _ in node.next_functions]
    return found


def _in_threads(calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """What each returns, in a thread of its device."""
    found: list[Any] = [None] * len(calls)
    state = ThreadState.of_caller(virtual_devices())
    begin = threading.Barrier(len(calls))

    def work(i: int) -> None:
        _HERE.is_device_thread = True
        try:
            with state.restored():
                if devices[i].type == virtual.NAME:
                    virtual.set_device(devices[i])
                begin.wait()
                found[i] = (calls[i](), None)
        except BaseException as error:
            found[i] = (None, error)

    threads = [
        threading.Thread(target=contextvars.Context().run, args=(work, i), name=f"autograd-{i}", daemon=True)
        for i in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    _join(threads)
    for _, error in found:
        if error is not None:
            try:
                raise error
            finally:
                found.clear()
                del error
    return [result for result, _ in found]


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for all; an interrupt waits for them too, since torch hears of none in a backward."""
    interrupt: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _joined(results: Sequence[Result | None], inputs: Any, whole: Callable[[], Any]) -> Any:
    """Of each input the gradient from the thread that came to it."""
    if not inputs:
        return None
    columns: list[list[torch.Tensor]] = [[] for _ in inputs]
    for result in results:
        for column, grad in zip(columns, result or (), strict=False):
            if grad is not None:
                column.append(grad)
    return tuple(functools.reduce(torch.add, column) if column else None for column in columns)


def virtual_devices() -> list[torch.device]:
    """All of them."""
    return [torch.device(virtual.NAME, i) for i in range(virtual.device_count())]


# ---- the current device of what a node calls


def _follow_devices() -> None:
    owner: Any = BackwardCFunction
    apply = owner.apply
    owner.apply = lambda self, *grads: _at(grads, lambda: apply(self, *grads))
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    init = hooks.__init__

    def with_device(self: Any, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        init(self, lambda x: (x.device, pack(x)), lambda packed: _there(packed[0], lambda: unpack(packed[1])))

    hooks.__init__ = with_device
    tensor: Any = torch.Tensor
    register = tensor.register_hook
    tensor.register_hook = lambda self, hook: register(
        self, functools.wraps(hook)(lambda g: _at((g,), lambda: hook(g)))
    )


def _at(grads: Sequence[Any], call: Callable[[], Any]) -> Any:
    found = [x.device for x in grads if isinstance(x, VirtualTensor)]
    return _there(found[0], call) if found else call()


def _there(device: torch.device, call: Callable[[], Any]) -> Any:
    if device.type != virtual.NAME:
        return call()
    with virtual.device(device):
        return call()
