"""What a process says on stderr that waits long for others: one line a wait, and not more often than once a minute."""

import logging
import time
from collections.abc import Callable
from typing import final

_LOGGER = logging.getLogger("fdp.distributed")


@final
class Notices:
    """The lines of a process, each `after` so many seconds of a wait, and so many seconds `apart` at least."""

    def __init__(self, after: float = 10.0, apart: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._after, self._apart, self._clock = after, apart, clock
        self._last = float("-inf")

    def begin(self) -> Callable[[Callable[[float], str | None]], None]:
        """A wait begins. What is returned asks for a text about the seconds so far when it is time, and says it."""
        began, has_said = self._clock(), False

        def say(text: Callable[[float], str | None]) -> None:
            nonlocal has_said
            now = self._clock()
            if has_said or now < began + self._after or now < self._last + self._apart:
                return
            said = text(now - began)
            if said is not None:  # else the wait is over
                has_said, self._last = True, now
                _LOGGER.warning("%s", said)  # on stderr, unless the program has set up something else

        return say


NOTICES = Notices()
