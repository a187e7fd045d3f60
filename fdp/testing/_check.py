"""A case checked: whole, whole again, then on slots; what is wrong is told."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NoReturn

from fdp._trees.listing import listed
from fdp.testing._case import WHERE, Case, CheckedRun, Way
from fdp.testing._causes import agrees_in_sequence, cause_of
from fdp.testing._compare import Difference, StructureError
from fdp.testing._sample import Arguments


def check(case: Case, ways: Sequence[Way]) -> None:
    """Raise an AssertionError at the first run on slots that is not like the one call on the whole batch."""
    whole = case.whole(case.places)
    repeats = _check_repeats(case, whole)
    for way in ways:
        with _told(case, whole, way):
            run = case.split(way)
        check_unwritten(case, run.arguments, str(way))
        with _told(case, whole, way):
            found = case.values(whole, run, bitwise=len(way.devices) == 1 and repeats) or case.gradients(whole, run)
        if found is not None:
            _fail(case, whole, found, way)


def check_unwritten(case: Case, arguments: Arguments, place: str) -> None:
    """Raise if a run wrote to its arguments."""
    if written := case.sample.written(arguments):
        raise AssertionError(
            f"{WHERE}: the function wrote in place to {listed(written)}, {place}. It must be pure: work on "
            "x.clone(), or return the new value"
        )


def _check_repeats(case: Case, whole: CheckedRun) -> bool:
    """Raise if a second call gives other results; whether they are the same bits."""
    again = case.whole(case.places)
    try:
        found = case.values(whole, again, bitwise=False) or case.gradients(whole, again)
        text = None if found is None else f"{found.leaf.path} differs"
    except StructureError:
        text = "the structure of the output differs"
    if text is not None:
        raise AssertionError(
            f"{WHERE}: {text} between two calls with the same arguments, on one device. Usual cause: random numbers, "
            "or state that the function keeps. Draw them outside and pass them as an input with a row for each of the "
            "batch, or switch dropout off for this (module.eval()). seed= makes a run repeatable, but each slot draws "
            "numbers of its own, which are not those of one device"
        )
    return case.values(whole, again, bitwise=True) is None


@contextlib.contextmanager
def _told(case: Case, whole: CheckedRun, way: Way) -> Iterator[None]:
    """Turn what is raised on several slots only into an AssertionError."""
    try:
        yield
    except StructureError as error:
        raise AssertionError(
            f"{WHERE}: {error}, {way}. Usual cause: a container with a part for each row: stack it to a tensor, or "
            "give it the out_dim 'items'"
        ) from None
    except Exception as error:
        if len(way.devices) == 1:  # misuse
            raise
        cause = agrees_in_sequence(case, whole, way) or (
            "an output that is not made row by row, or is joined in another way than it is made"
            if str(error).startswith(("dp_apply: ", "value_and_grad: "))
            else "a fixed batch size, or a tensor that every slot gets whole although it has a row for each of the "
            "batch (None in in_dims, or closed over)"
        )
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise AssertionError(
            f"{WHERE}: the function works on one slot, but {way}, there was a {type(error).__name__}: {error}"
            f"{notes}. Usual cause: {cause}"
        ) from error


def _fail(case: Case, whole: CheckedRun, found: Difference, way: Way) -> NoReturn:
    others = f"; {len(found.others)} more too, from {found.others[0]} on" if found.others else ""
    raise AssertionError(
        f"{WHERE}: {found.leaf.path} differs {way}, from one call with all {case.sample.rows} rows: it {found.text}"
        f"{others}. {cause_of(case, whole, found, way)}"
    )
