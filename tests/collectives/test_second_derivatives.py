"""Second derivatives through collectives: right in whichever threads the parts of a graph have been recorded."""

import threading

import torch
from torch import Tensor

import fdp
from tests.common.threads import many_cores, within

DEVICES = fdp.virtual_devices(3)


def fn(w: Tensor, x: Tensor) -> Tensor:
    """Two collectives of which neither needs the other."""
    h = torch.tanh(x * fdp.psum(x.sum(0))) * w
    return h + fdp.ppermute(h.sum(0), [(0, 1), (1, 2)])


def expected(w: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(x * x.sum(0)) * w
    parts = [part.sum(0) for part in h.split(2)]
    return h + torch.cat([torch.zeros(2), parts[0].expand(2), parts[1].expand(2)])


def test_a_backward_in_other_threads_than_the_forward():
    x, w = torch.rand(6, dtype=torch.float64).requires_grad_(), torch.ones(1, dtype=torch.float64, requires_grad=True)
    begun, over = threading.Barrier(3), threading.Event()

    def long(i: Tensor) -> Tensor:
        if i == 1:
            for _ in range(300):  # this thread has recorded more than the others
                w.neg()
        return fdp.psum(i)

    def occupy(i: Tensor) -> Tensor:
        fdp.psum(i)
        begun.wait(20)
        over.wait(20)
        return i

    def second(y: Tensor) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(y.sin().sum(), (w, x), create_graph=True)
        return torch.autograd.grad(grads[0].sin().sum() + grads[1].sin().sum(), (w, x))

    def call() -> tuple[Tensor, ...]:
        fdp.dp_apply(lambda _, i: long(i), None, torch.arange(3), DEVICES)
        y = fdp.dp_apply(fn, w, x, DEVICES)
        mapped = fdp.shard_map(occupy, devices=DEVICES[:2], executor="threads")
        other = threading.Thread(target=mapped, args=(torch.arange(2),), daemon=True)
        other.start()
        begun.wait(20)
        try:
            return second(y)
        finally:
            over.set()
            other.join()

    with many_cores():
        found = within(30, call)
    torch.testing.assert_close(found, second(expected(w, x)))
