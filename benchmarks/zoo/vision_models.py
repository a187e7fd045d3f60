"""timm and torchvision: the smallest model of each family, on small images."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.model import ROWS, Model, Ways, check_size, prepared

MOST_PARAMETERS = 90_000_000
# Words in names of small models, the smallest first.
SMALL = [
    "test",
    "zepto",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxt",
    "xxs",
    "xx_small",
    "xs",
    "tiny",
    "_t",
    "small",
    "_s",
    "_b0",
    "_0",
    "18",
]


def size_of(name: str) -> tuple[int, int]:
    """Names of small models before others."""
    return next((i for i, word in enumerate(SMALL) if word in name), len(SMALL)), len(name)


def image(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@cache
def prepare_torchvision() -> None:
    """Let torchvision be imported beside a torch without CUDA.

    Its published wheels are built for CUDA, and then its compiled operators do not load. The models tried here call
    none of them, but the import of the package asks for two by name.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def timm_families() -> list[str]:
    timm: Any = importlib.import_module("timm")
    return sorted(family for family in timm.list_modules() if timm.list_models(module=family))


def timm_ways(family: str) -> Ways:
    timm: Any = importlib.import_module("timm")

    def way(name: str, size: int, **options: Any) -> Callable[[], Model]:
        def made() -> Model:
            build = partial(timm.create_model, name, num_classes=10, **options)
            check_size(build, MOST_PARAMETERS)
            module = build()
            key = next(iter(inspect.signature(module.forward).parameters))
            return Model(prepared(module), {key: image(3, size, size)})

        return made

    for name in sorted(timm.list_models(module=family), key=size_of)[:3]:
        yield way(name, 32, img_size=32, depth=2)
        yield way(name, 32)
        yield way(name, 64, img_size=64)
        yield way(name, 64)
        yield way(name, 128, img_size=128)
        yield way(name, 128)
        yield way(name, timm.get_pretrained_cfg(name).input_size[-1])


def torchvision_families() -> list[str]:
    """All but detection, which takes and returns lists."""
    return sorted(family for family in _builders() if not family.startswith("detection"))


def _builders() -> dict[str, list[str]]:
    """The names of the models in each file."""
    models: Any = importlib.import_module("torchvision.models")
    found: dict[str, list[str]] = {}
    for name in models.list_models():
        family = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        found.setdefault(family, []).append(name)
    return found


def torchvision_ways(family: str) -> Ways:
    models: Any = importlib.import_module("torchvision.models")
    batches: list[dict[str, Tensor]]
    if family.startswith("optical_flow"):
        batches = [{"image1": image(3, 128, 128), "image2": image(3, 128, 128)}]
    elif family.startswith("video"):
        batches = [{"x": image(3, 16, size, size)} for size in (112, 224)]
    else:
        batches = [{"x": image(3, size, size)} for size in (32, 64, 128, 224)]

    def way(name: str, batch: dict[str, Tensor]) -> Callable[[], Model]:
        def made() -> Model:
            options = {"weights_backbone": None} if family.startswith("segmentation") else {}
            build = partial(models.get_model, name, weights=None, **options)
            check_size(build, MOST_PARAMETERS)
            module = prepared(build())
            key = next(iter(inspect.signature(module.forward).parameters))
            return Model(module, batch if len(batch) > 1 else {key: next(iter(batch.values()))})

        return made

    for name in sorted(_builders()[family], key=size_of)[:2]:
        for batch in batches:
            yield way(name, batch)
