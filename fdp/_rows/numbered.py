"""The draws of a shard: operations that take random numbers, each with a number of its own.

Draw k is made with the default generators as a seed `fold_in(seed, k)` leaves them, and afterwards they are seeded for
draw k + 1. So their state says which draw comes next, also where activation checkpointing puts it back to draw the same
once more. Something that draws without coming here, such as a kernel of the user's, leaves another state: an error.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fdp._execution.fold_in import fold_in
from fdp._execution.generators import generators_of
from fdp._placement.moves import bytes_of
from fdp._placement.slot import Slot
from fdp._trees import torch_private

T = TypeVar("T")


class Numbered(TorchDispatchMode):
    """Gives each draw its number, and seeds the generators for it."""

    def __init__(self, seed: int, slot: Slot) -> None:
        super().__init__()
        self.slot, self._seed, self._generators = slot, seed, generators_of(slot.device)
        self._numbers: dict[int, int] = {}
        self._states: dict[int, list[bytes]] = {}
        self.go_to(0)

    def draw(self, number: int, call: "Called") -> Any:
        """Make the draw with a number."""
        raise NotImplementedError

    def which(self, number: int, call: "Called") -> int:
        """The number of the draw that this is, where `number` comes next."""
        return number

    def other(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What is no draw."""
        return func(*args, **kwargs)

    def ended(self, result: T) -> T:
        """What the shard returned, checked."""
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `leave_alone` says the same once, and not at every operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = _DRAWS.get(func)
        if draws is None:
            draws = _DRAWS[func] = torch.Tag.nondeterministic_seeded in func.tags
        if not draws:
            return self.other(func, args, kwargs)
        if func._can_decompose():  # into operations that draw; in inference mode nobody has done so before
            with self:
                return func.decompose(*args, **kwargs)
        call = Called.of(func, args, kwargs)
        if call.is_certain():
            return self.other(func, args, kwargs)
        if call.generator is not None:
            raise RuntimeError(
                f"randomness='rows': {func} draws from a generator of its own{where_called()}, whose numbers cannot be "
                "shared out to rows. Draw without generator=, from the seed of the call"
            )
        number = self.which(self.number(str(func)), call)
        result = self.draw(number, call)
        self.go_to(number + 1)
        return result

    def number(self, name: str) -> int:
        """The number of the draw that comes next."""
        number = self._numbers.get(torch.default_generator.initial_seed())
        if number is None or self._read() != self._states[number]:
            raise RuntimeError(
                f"randomness='rows': before {name}{where_called()} something has used torch's generator in a way that "
                "fdp does not see: a kernel of your own that draws, torch.manual_seed, a call inside that has a seed= "
                "too. Draw with operations of torch, and leave the generator alone"
            )
        return number

    def go_to(self, number: int) -> None:
        self.reseed(number)
        self._numbers[torch.default_generator.initial_seed()] = number
        if number not in self._states:
            self._states[number] = self._read()

    def reseed(self, number: int, row: int | None = None) -> None:
        """Seed for a draw, or for the part of it that is a row's."""
        seed = fold_in(self._seed, number)
        for generator in self._generators:
            generator.manual_seed(seed if row is None else fold_in(seed, row))

    def _read(self) -> list[bytes]:
        return torch_private.outside_transforms(
            lambda: [bytes_of(generator.get_state()) for generator in self._generators]
        )


class Argument(NamedTuple):
    """An argument of an operation; one that `is_written` becomes what is drawn."""

    name: str
    value: Any
    is_written: bool
    is_keyword: bool


class Called(NamedTuple):
    """A call of an operation that draws."""

    func: Any
    name: str
    arguments: tuple[Argument, ...]

    @classmethod
    def of(cls, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Self:
        """With names for its arguments."""
        written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
        named = zip(func._schema.arguments, args, strict=False)
        arguments = [Argument(a.name, value, written[a.name], False) for a, value in named]
        arguments += [Argument(name, value, written[name], True) for name, value in kwargs.items()]
        return cls(func, func._schema.name.removeprefix("aten::"), tuple(arguments))

    def __call__(self, values: Sequence[Any] | None = None) -> Any:
        """Run it, with other values for its arguments."""
        values = [argument.value for argument in self.arguments] if values is None else values
        named = list(zip(self.arguments, values, strict=True))
        kwargs = {argument.name: value for argument, value in named if argument.is_keyword}
        return self.func(*[value for argument, value in named if not argument.is_keyword], **kwargs)

    def parameters(self) -> list[torch.Tensor]:
        """The tensors whose values it takes, and not their shapes alone."""
        return [
            a.value
            for a in self.arguments
            if isinstance(a.value, torch.Tensor)
            and not self.name.endswith("_like")
            and (not a.is_written or (a.name == "self" and self.name.startswith("rrelu")))
        ]

    @property
    def generator(self) -> Any:
        return next((argument.value for argument in self.arguments if argument.name == "generator"), None)

    @property
    def others(self) -> tuple[Any, ...]:
        """What is no tensor and no size."""
        return tuple(
            argument.value
            for argument in self.arguments
            if not isinstance(argument.value, torch.Tensor) and argument.name != "size"
        )

    def is_certain(self) -> bool:
        """Whether it draws nothing: a fused operation whose dropout is off."""
        given = {a.name: a.value for a in self.arguments}  # torch leaves out what has its default
        schema = self.func._schema.arguments
        return any(given.get(a.name, a.default_value) == 0 for a in schema if a.name in ("dropout_p", "dropout"))

    def is_dense(self) -> bool:
        """Whether the order of its elements in memory is that of their indices."""
        return all(a.value.is_contiguous() for a in self.arguments if isinstance(a.value, torch.Tensor))

    def shapes(self, result: Any = ()) -> tuple[tuple[int, ...], ...]:
        """Those of its tensors, results last."""
        given = [argument.value for argument in self.arguments if isinstance(argument.value, torch.Tensor)]
        return tuple(tuple(tensor.shape) for tensor in (*given, *each_of(result)))

    def size(self, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        """The size that it is called with, if that is an argument of it."""
        return next((tuple(argument.value) for argument in self.arguments if argument.name == "size"), otherwise)

    def returned(self, found: Any, grown: Sequence[Any], kept: Sequence[torch.Tensor]) -> Any:
        """What it returns, if `kept` is what it drew: that is written to the arguments which it writes to."""
        results = []
        for x, own in zip(each_of(found), kept, strict=True):
            given = next((a.value for a, whole in zip(self.arguments, grown, strict=False) if whole is x), None)
            results.append(own.clone() if given is None else given.copy_(own))
        return tuple(results) if isinstance(found, tuple | list) else results[0]


_DRAWS: dict[Any, bool] = {}  # of operations


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def each_of(result: Any) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple | list) else (result,)


def where_called() -> str:
    """The line of the user's that an operation comes from."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return "" if frame is None else f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"


_LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))
