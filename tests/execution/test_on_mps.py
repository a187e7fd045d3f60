"""Seeds on a backend that is not here: `torch.mps` has a generator of its own, and no `default_generators`."""

import pytest
import torch

from fdp._execution.generators import OwnGenerators, generators_of


def test_the_generator_of_mps(monkeypatch: pytest.MonkeyPatch):
    stands_in = torch.Generator()
    monkeypatch.setattr("torch.mps._default_mps_generator", stands_in)
    device = torch.device("mps:0")
    assert generators_of(device) == [torch.default_generator, stands_in]
    before = stands_in.get_state()
    own = OwnGenerators(3, device)
    own.resume()
    drawn = torch.rand(4, generator=stands_in)
    own.pause()
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(stands_in.get_state(), before)
