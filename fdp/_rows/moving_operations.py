"""Which operations move rows: reorder them, cut them or join them. What is not known to fdp may do so too."""

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from fdp._rows.numbered import names, where_called


class MadeOf(NamedTuple):
    """A tensor, and the operation that has made it."""

    tensor: torch.Tensor
    given: Sequence[torch.Tensor]
    func: Any
    values: dict[str, Any]

    @property
    def name(self) -> str:
        return self.func.__name__.split(".")[0]

    def how(self) -> str:
        """What has been called, and where."""
        return f"{self.func}{where_called()}"


def row_dims(tensor: torch.Tensor, rows: int) -> int:
    """How many dims may hold rows."""
    return sum(bool(n) and n % rows == 0 for n in tensor.shape)


def moves(made: MadeOf, rows: int, counted: Container[int]) -> bool:
    """Whether rows among what it is given are moved, or may be. `counted` are ids of 0, 1, 2, ... for all rows."""
    if made.func.namespace not in ("aten", "prim", "prims") or made.name in _ANYHOW or "_foreach" in made.name:
        return True
    if made.name in _CUTS and made.tensor.shape == made.given[0].shape:
        return False
    sources, along = made.given if made.name == "cat" else made.given[:1], _along(made, rows, counted)
    sizes = [x.shape[i] for i in along for x in sources if -x.ndim <= i < x.ndim]
    return any(size and size % rows == 0 for size in sizes)


def counts(made: MadeOf, rows: int, counted: Container[int]) -> bool:
    """Whether it is 0, 1, 2, ... for all rows, along whatever dim."""
    if made.name == "arange":
        begin = made.values.get("start", 0), made.values.get("step", 1)
        return made.tensor.shape == (rows,) and begin == (0, 1)
    is_same = made.name in _SAME_NUMBERS and made.tensor.numel() % rows == 0
    return is_same and made.tensor.dtype in (torch.int32, torch.int64) and id(made.given[0]) in counted


def _along(made: MadeOf, rows: int, counted: Container[int]) -> Iterable[int]:
    """The dims along which it moves elements."""
    values, source = made.values, made.given[0]
    if made.name in _FIXED:
        return _FIXED[made.name]
    if made.name == "repeat":
        return [i for i in range(-source.ndim, 0) if values["repeats"][i] != 1]
    if made.name == "constant_pad_nd":
        return [-1 - i // 2 for i, count in enumerate(values["pad"]) if count]
    if made.name in _BY_INDICES:
        return _indexed(made, rows, counted)
    if made.name not in _CUTS | _ALONG:
        return ()
    if "dims" in values:
        return values["dims"] or range(source.ndim)  # roll of all as one
    return [values[name] for name in ("dim", "dimension", "dim1", "dim2") if name in values]


def _indexed(made: MadeOf, rows: int, counted: Container[int]) -> list[int]:
    """A mask is for several dims. One that says where a single value is written leaves rows in their places."""
    along, i, values = [], 0, made.values.get("values")
    for index in made.values["indices"]:
        if index is None:
            i += 1
            continue
        is_mask = index.dtype in (torch.bool, torch.uint8)
        dims = range(i, i + (index.ndim if is_mask else 1))
        is_each = id(index) in counted and made.given[0].shape[i] == rows
        is_filled = is_mask and values is not None and values.numel() == 1
        along += [] if is_each or is_filled else dims
        i = dims.stop
    return along


VIEWS = names("view _unsafe_view _reshape_alias view_copy reshape _reshape_copy")
OVERWRITES = names("copy_ fill_ zero_")
_SAME_NUMBERS = names("unsqueeze view expand slice alias detach _to_copy")
_CUTS = names("slice select split split_with_sizes unsafe_split unsafe_split_with_sizes unbind cat")
_ALONG = names(
    "flip roll rot90 sort topk unfold diagonal gather index_select index_copy index_copy_ index_add index_add_ "
    "index_fill index_fill_ index_reduce index_reduce_ scatter scatter_ scatter_add scatter_add_ scatter_reduce "
    "scatter_reduce_ slice_scatter select_scatter diagonal_scatter"
)
_BY_INDICES = names("index _unsafe_index index_put index_put_ _index_put_impl_ _unsafe_index_put _unsafe_masked_index")
_ANYHOW = names("take put put_ masked_scatter masked_scatter_ as_strided as_strided_ as_strided_scatter resize_ set_")
_FIXED = {"embedding": (0,), "channel_shuffle": (1,), "native_channel_shuffle": (1,)} | dict.fromkeys(
    ("pixel_shuffle", "pixel_unshuffle"), (-3, -2, -1)
)
