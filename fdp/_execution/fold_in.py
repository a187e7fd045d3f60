"""New seeds from seeds."""

import operator


def fold_in(seed: int, data: int) -> int:
    """A new seed from a seed and a number, such that different numbers give unrelated streams.

    >>> import fdp
    >>> fdp.fold_in(0, 1) == fdp.fold_in(0, 1), fdp.fold_in(0, 1) == fdp.fold_in(0, 2)
    (True, False)

    Args:
        seed: Any integer; it counts modulo 2**64.
        data: Any integer, likewise: the number of a slot, of a step, of an epoch.

    Returns:
        An integer in `[0, 2**63)`, for `torch.manual_seed` and the like.

    Raises:
        TypeError: A float, or something else that is no integer.

    The mixing is SplitMix64's (Steele, Lea and Flood, 2014); the name and use are `jax.random.fold_in`'s.
    """
    return _mix(_mix(operator.index(seed) & _MASK) ^ (operator.index(data) & _MASK)) >> 1


_MASK = (1 << 64) - 1


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)
