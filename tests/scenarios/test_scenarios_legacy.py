"""A legacy script with one import changed: the model, its hooks and checkpoints are those of a script for torch's."""

import copy
import io
import pickle
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

from fdp import DataParallel
from tests.common.comparing import assert_close_tree
from tests.common.numbers import COUNTS, numbers
from tests.common.threads import side_by_side

STEPS = 4
VOCABULARY = 11


class Captioner(nn.Module):
    """Images to tokens, as such models were written: a config, a generate method, both kinds of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden=6, steps=STEPS)
        self.encoder = spectral_norm(nn.Linear(5, 6))
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.decoder = nn.GRU(6, 6, num_layers=2, batch_first=True)
        self.head = old_spectral_norm(nn.Linear(6, VOCABULARY))

    def forward(self, images: Tensor, tokens: Tensor, scale: float = 1.0) -> dict[str, list[Tensor]]:
        self.decoder.flatten_parameters()
        start = torch.tanh(self.encoder(images)).expand(2, -1, -1).contiguous()
        states, last = self.decoder(self.embedding(tokens), start)  # (rows, steps, hidden)
        logits = self.head(states) * scale
        return {"logits": [logits, logits.log_softmax(-1)], "last": [last.transpose(0, 1)]}

    def generate(self, images: Tensor) -> Tensor:
        tokens = torch.zeros(len(images), 1, dtype=torch.long)
        for _ in range(self.config.steps):
            logits = self(images, tokens)["logits"][0]
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        return tokens


def captioner() -> Captioner:
    torch.manual_seed(0)
    return Captioner().double()


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return numbers(rows, 5), torch.arange(rows * STEPS).reshape(rows, STEPS) % VOCABULARY


def cross_entropy(out: dict[str, list[Tensor]], tokens: Tensor) -> Tensor:
    return nn.functional.nll_loss(out["logits"][1][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def trained(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Three steps of training: the outputs and losses."""
    history = []
    for _ in range(3):
        images, tokens = batch()
        optimizer.zero_grad()
        out = model(images, tokens=tokens, scale=0.5)
        loss = cross_entropy(out, tokens)
        loss.backward()
        optimizer.step()
        history.append({"out": out, "loss": loss.detach()})
    return history


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("count", COUNTS)
def test_the_script_trains_the_same_model(count: int):
    plain = captioner()
    expected = trained(plain, torch.optim.Adam(plain.parameters()))
    model = captioner()
    optimizer = torch.optim.Adam(model.parameters())  # before it is wrapped
    wrapped: Any = DataParallel(model, device_ids=["cpu"] * count)
    assert_close_tree(trained(wrapped, optimizer), expected)
    assert_close_tree(state(wrapped), state(plain))
    assert wrapped.module.config.steps == STEPS
    assert torch.equal(wrapped.eval().module.generate(batch()[0]), plain.eval().generate(batch()[0]))


@pytest.mark.parametrize("devices", [None, [0, 1], ["cuda:0"], []], ids=str)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without an accelerator")
def test_the_script_runs_on_a_machine_without_gpus(devices: Any):
    plain = captioner()
    expected = trained(plain, torch.optim.Adam(plain.parameters()))
    wrapped = DataParallel(captioner(), device_ids=devices)
    assert_close_tree(trained(wrapped, torch.optim.Adam(wrapped.parameters())), expected)
    assert wrapped.device_ids == []


def test_checkpoints_go_from_torch_to_fdp_and_back():
    theirs, ours = nn.DataParallel(captioner()), DataParallel(captioner(), ["cpu"] * 2)
    trained(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    theirs.load_state_dict(torch.load(file))
    assert_close_tree(state(theirs), state(ours))

    fresh, bare = DataParallel(captioner(), ["cpu"] * 2), captioner()
    fresh.load_state_dict(theirs.state_dict())
    assert_close_tree(state(fresh), state(ours))
    bare.load_state_dict(ours.module.state_dict())
    other = DataParallel(captioner(), ["cpu"] * 3)
    other.module.load_state_dict(bare.state_dict())
    assert_close_tree(state(other), state(ours))


def test_wrapping_twice_is_refused_where_it_would_split_twice():
    with pytest.raises(TypeError, match=r"the module is a DataParallel already; pass its \.module"):
        DataParallel(DataParallel(captioner(), ["cpu"] * 2), ["cpu"] * 2)
    once = captioner()
    twice = DataParallel(DataParallel(once, ["cpu"] * 2), ["cpu"])
    assert_close_tree(twice.eval()(*batch()), once.eval()(*batch()))


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_it_is_copied_and_pickled(again: Any):
    model = captioner()
    model.encoder = nn.Linear(5, 6).double()  # parametrized modules are not pickled
    wrapped: Any = DataParallel(model, ["cpu"] * 3, weights=[1, 2, 1])
    trained(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    other = again(wrapped)
    assert_close_tree(state(other), state(wrapped))
    expected = wrapped.eval()(*batch())
    assert_close_tree(other.eval()(*batch()), expected)
    with torch.no_grad():
        other.module.embedding.weight.zero_()
    assert_close_tree(wrapped(*batch()), expected)


def test_a_hook_fires_once_a_slot():
    """In torch's, all replicas share the dicts of hooks."""
    model = captioner().eval()
    wrapped = DataParallel(model, ["cpu"] * 4)
    activations: dict[str, list[Tensor]] = defaultdict(list)

    def remember(module: nn.Module, args: Any, output: Tensor) -> None:
        activations[type(module).__name__].append(output.detach())

    handles = [model.encoder.register_forward_hook(remember), model.head.register_forward_hook(remember)]
    encoded = model.encoder(batch()[0])
    activations.clear()
    with side_by_side(4), torch.no_grad():
        for _ in range(50):
            wrapped(*batch())
    assert {name: len(seen) for name, seen in activations.items()} == {"ParametrizedLinear": 200, "Linear": 200}
    seen = activations["ParametrizedLinear"]
    assert all(any(torch.equal(part, chunk) for chunk in encoded.chunk(4)) for part in seen)
    for handle in handles:
        handle.remove()
    wrapped(*batch())
    assert len(seen) == 200
