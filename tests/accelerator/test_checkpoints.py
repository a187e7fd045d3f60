"""States on an accelerator, copied to the host while the program goes on. Checkpoints refuse the double's subclass."""

import torch

from fdp.distributed._portable import _copied_into


def test_copies_are_kept_in_pinned_memory():
    x = torch.ones(3, 2, device="virtual:1").t()
    room = _copied_into(None, x)
    assert room.is_pinned()
    assert room.stride() == x.stride()
    assert _copied_into(room, 2 * x) is room
    assert torch.equal(room, torch.full((2, 3), 2.0))
    assert not _copied_into(None, torch.ones(3)).is_pinned()
