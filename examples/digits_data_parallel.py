"""The digits as a script for torch.nn.DataParallel, with one import changed.

A plain training loop: a module, an optimizer of torch.optim, backward and step. It runs once with the module as it is
and once wrapped, on virtual CPU devices or with `--devices gpu` on all accelerators of the machine, and compares the
trained parameters. In float64 they differ by rounding alone; if they differ by more, the exit status is 1.
"""

import argparse
import sys
import time

try:
    import torch
    import torch.nn.functional as F
    from digits import accuracy, digits, network, shuffled, whole
    from torch import Tensor, nn

    from fdp import DataParallel  # was: from torch.nn import DataParallel
except ImportError as error:
    sys.exit(f'digits_data_parallel.py: {error}. To install what the example needs: pip install ".[demo]"')

TOLERANCE = 1e-9  # in float64; rounding alone stays a million times below


def train(devices: list[str] | None, options: argparse.Namespace) -> dict[str, Tensor]:
    (images, labels), (test_images, test_labels) = digits(torch.float64, options.seed)
    torch.manual_seed(options.seed)
    model = network().double()
    if torch.accelerator.is_available() and options.devices == "gpu":
        model.to(torch.accelerator.current_accelerator())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if devices != ["cpu"]:
        model = DataParallel(model, device_ids=devices)
    device = next(model.parameters()).device

    start = time.perf_counter()
    model.train()
    for x, y in shuffled(images, labels, 100, options.epochs, options.seed):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    model.eval()
    with torch.no_grad():
        correct = accuracy(model(test_images.to(device)), test_labels.to(device)).item()
    slots = len(model.device_ids) or 1 if isinstance(model, DataParallel) else 1
    print(f"{slots} device{'s' * (slots > 1)}: {correct:.1%} of the test images, {seconds:.1f} s")
    unwrapped: nn.Module = model.module if isinstance(model, DataParallel) else model
    return {name: param.detach().cpu() for name, param in unwrapped.named_parameters()}


def slots(text: str) -> str | int:
    return text if text == "gpu" else whole(1, 1024, ", or gpu")(text)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="digits_data_parallel.py",
        description="Train a network on handwritten digits with fdp.DataParallel and without, and compare.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=slots, default=4, metavar="N|gpu", help="virtual CPU devices, or gpu for all")
    parser.add_argument("--epochs", type=whole(1, 10_000), default=5, metavar="N", help="times through the images")
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="start, split and order")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    torch.set_num_threads(1)  # threads gain nothing on images this small
    one = train(["cpu"], options)
    many = train(None if options.devices == "gpu" else ["cpu"] * options.devices, options)
    difference = max((one[name] - many[name]).abs().max().item() for name in one)
    print(f"Largest difference between the parameters: {difference:.1e}")
    if not difference <= TOLERANCE:
        print(f"digits_data_parallel.py: they disagree by more than {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
