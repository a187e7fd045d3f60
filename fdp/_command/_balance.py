"""How fast the devices are beside each other, and the weights that follow."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from fdp._command._results import Result

EQUAL = 0.85  # a device that reaches this share of the fastest one is taken for as fast
_SIDE = {"cpu": 512}  # of the square matrices; accelerators need large ones to show what they can
_LARGE_SIDE = 2048
_PRODUCTS = 4  # a measurement
_MEASUREMENTS = 5

Rate = Callable[[torch.device], float]


def product_rate(device: torch.device) -> float:
    """Floating-point operations a second, in products of float32 matrices: the median of some measurements."""
    side = _SIDE.get(device.type, _LARGE_SIDE)
    factor = torch.ones(side, side, device=device)

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def seconds() -> float:
        wait()
        start = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.mm(factor, factor)
        wait()
        return time.perf_counter() - start

    seconds()  # the first time kernels are loaded
    return _PRODUCTS * 2 * side**3 / statistics.median(seconds() for _ in range(_MEASUREMENTS))


def check_balance(devices: Sequence[torch.device], rate: Rate = product_rate) -> Result:
    """Measure the devices; say which `weights=` give each what it can do."""
    rates = {device: rate(device) for device in dict.fromkeys(devices)}
    speeds = {str(device): round(each / 1e9, 1) for device, each in rates.items()}
    weights = weights_of(devices, rates)
    details = {"gflops": speeds, "weights": weights}
    if len(rates) == 1:
        (gflops,) = speeds.values()
        return Result("balance", "ok", f"one device, {gflops:,} GFLOP/s: slots need no weights", details=details)
    lines = [f"{device}: {gflops:,} GFLOP/s in products of float32 matrices" for device, gflops in speeds.items()]
    if weights is None:
        return Result("balance", "ok", "the devices are equally fast: slots need no weights", None, lines, details)
    advice = (
        f"if nothing else ran on them, pass weights={weights}, or leave the slow ones out; measure your own model "
        "before you keep them"
    )
    return Result("balance", "warning", "the slots are not equally fast", advice, lines, details)


def weights_of(devices: Sequence[torch.device], rates: Mapping[torch.device, float]) -> list[float] | None:
    """The relative rows of each slot, None if all are alike. Slots on one device share what it can do.

    >>> cpu, meta = torch.device("cpu"), torch.device("meta")
    >>> weights_of([cpu, meta], {cpu: 50.0, meta: 200.0})
    [0.25, 1.0]
    >>> weights_of([cpu, meta], {cpu: 190.0, meta: 200.0}) is None
    True
    """
    count = Counter(devices)
    shares = [rates[device] / count[device] for device in devices]
    fastest = max(shares)
    if min(shares) >= EQUAL * fastest:
        return None
    return [round(max(share / fastest, 0.01), 2) for share in shares]
