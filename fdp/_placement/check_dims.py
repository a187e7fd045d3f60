"""What may stand in in_dims and out_dims for one leaf."""

from fdp._trees.listing import quoted

REDUCTIONS = ("mean", "sum", "max", "min", "stack", "list")


def check_in_dim(spec: object, path: str) -> None:
    """An input's spec, when functions have been called, is an int, None or 'items'."""
    if isinstance(spec, bool) or not (spec is None or spec == "items" or isinstance(spec, int)):
        raise ValueError(
            f"the dim for {path} is {quoted(spec)}; expected an int (split), None (whole), 'items' (split a list) "
            "or a function of the tensor that returns one of these"
        )


def check_out_dim(spec: object, path: str) -> None:
    """An output's spec is an int, None, 'items' or the name of a reduction."""
    if isinstance(spec, bool) or not (spec is None or isinstance(spec, int) or spec in ("items", *REDUCTIONS)):
        raise ValueError(
            f"the out_dim for {path} is {quoted(spec)}; expected an int (concatenate), None (slot 0's value), "
            f"'items' (join lists) or one of {', '.join(map(repr, REDUCTIONS))}"
        )
