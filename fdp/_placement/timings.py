"""How long the shards of a plan take side by side and one after the other, so that `"auto"` takes the faster way.

Results do not depend on the way (law L8), so it may be tried. Times are noisy, and so the median of the last few
counts, and what a way has shown is forgotten when it is tried again: three slow calls mislead for a while only. Any
thread may use them: two at once may count a call once, or both try the same way, and no more.
"""

from collections import deque
from typing import final

_TRIALS = 3  # of each way: in the first a thread may have to start, and caches are cold
_AGAIN = 16
_KEPT = 5


@final
class Timings:
    """What calls of a plan have shown, in seconds."""

    def __init__(self) -> None:
        self._calls = 0
        self._in_order: deque[float] = deque(maxlen=_KEPT)
        self._in_threads: deque[float] = deque(maxlen=_KEPT)

    def begin(self) -> bool:
        """Count a call. Whether it runs one shard after the other: where that was faster, or is to be tried.

        Each way is tried in the first calls, and the slower one again after 16 calls, 32, 64 and so on.
        """
        self._calls += 1
        if self._calls <= 2 * _TRIALS:
            return self._calls % 2 == 0
        in_order = self._is_faster_in_order()
        if self._calls >= _AGAIN and self._calls & (self._calls - 1) == 0:
            in_order = not in_order
            (self._in_order if in_order else self._in_threads).clear()
        return in_order

    def note(self, seconds: float, *, in_order: bool) -> None:
        """Remember how long a call took that nothing has disturbed."""
        (self._in_order if in_order else self._in_threads).append(seconds)

    def _is_faster_in_order(self) -> bool:
        """In threads where nothing is known: of a way in which calls fail."""
        return len(self._in_order) > 0 and _median(self._in_order) < _median(self._in_threads)

    def is_trying(self) -> bool:
        """Whether both ways are still tried."""
        return self._calls < 2 * _TRIALS

    def why_in_order(self) -> str | None:
        """Why shards run one after the other, None if they do not."""
        if not self._is_faster_in_order():
            return None
        return f"they have taken {_text(self._in_order)} so, and {_text(self._in_threads)} in threads"

    def why_in_threads(self) -> str:
        """Why they run side by side, with a colon before it; empty where one way has not been taken to its end."""
        if not (self._in_order and self._in_threads):
            return ""
        return f": they have taken {_text(self._in_threads)} so, and {_text(self._in_order)} one after the other"


def _text(times: deque[float]) -> str:
    return f"{1000 * _median(times):.2g} ms"


def _median(times: deque[float]) -> float:
    found = sorted(times.copy())
    return found[len(found) // 2] if found else 0.0
