"""transformers: every architecture that has a config, shrunk field by field, with inputs made from its signature."""

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.model import ROWS, LeftOut, Model, Ways, check_size, prepared

TOKENS, LENGTH, VOCABULARY = 60, 8, 99
MOST_PARAMETERS = 70_000_000
HIDDEN, HEADS, LAYERS = 64, 4, 2

DEPTHS = ("hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
# What a field becomes, by the end of its name; the first that fits. Others stay.
FIELDS: list[tuple[tuple[str, ...], int]] = [
    (("vocab_size", "vocab_size_per_layer_input", "n_vocab", "vocab_length"), VOCABULARY),
    (
        ("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_head_size"),
        HIDDEN // HEADS,
    ),
    (("kv_lora_rank", "q_lora_rank"), 16),
    (("key_value_heads", "kv_heads", "num_kv_heads", "multi_query_group_num"), HEADS),
    (("attention_heads", "num_heads", "n_head", "n_heads", "encoder_heads", "decoder_heads"), HEADS),
    (DEPTHS, LAYERS),
    (("intermediate_size", "ffn_dim", "d_ff", "n_inner", "inner_dim", "mlp_dim", "ffn_hidden_size"), 2 * HIDDEN),
    (("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    (("experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    (("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    (("hidden_size", "hidden_dim", "d_model", "n_embd", "embed_dim", "embedding_size", "emb_dim"), HIDDEN),
    (("projection_dim", "output_dim", "out_hidden_size", "text_embed_dim", "encoder_hid_dim"), HIDDEN),
    (("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx"), 64),
    (("rotary_dim",), HIDDEN // HEADS),
    (("context_size",), 32),
    (("num_kv_shared_layers",), 0),
    (("num_queries", "num_latents"), 8),
]
# What some models must be told, and have no default for.
MISSING = {
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "head_dim": HIDDEN // HEADS,
    "num_key_value_heads": HEADS,
}
# Lists with an entry for each stage, and what they are divided by.
LISTS = {"hidden_sizes": 4, "embed_dims": 4, "encoder_hidden_sizes": 4, "depths": 100, "layer_depths": 100}
# The heads of a model that return most, before its body.
PREFERRED = [
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_CLASSIFICATION",
]


def names() -> list[str]:
    """The types of models that a config builds."""
    auto: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    return sorted(name for name in auto.CONFIG_MAPPING_NAMES if _class_names(name))


def _class_names(name: str) -> list[str]:
    """The classes of a type, a head first and then the body."""
    modeling_auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = {key: value for key, value in vars(modeling_auto).items() if key.startswith("MODEL_")}
    mappings = {key: value for key, value in mappings.items() if key.endswith("_NAMES")}
    first = [f"MODEL_FOR_{key}_MAPPING_NAMES" for key in PREFERRED]
    order = [*first, "MODEL_MAPPING_NAMES", *sorted(mappings.keys() - {*first, "MODEL_MAPPING_NAMES"})]
    found: list[str] = []
    for key in order:
        value = mappings.get(key, {}).get(name, ())
        found += [value] if isinstance(value, str) else value
    return list(dict.fromkeys(found))


def ways(name: str) -> Ways:
    """The first head and the body, small in all fields and then in few, with all kinds of inputs."""
    transformers: Any = importlib.import_module("transformers")
    config_class: Any = transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]
    for class_name in _class_names(name)[:2]:
        for shrink in (shrunk, expanded, shortened):
            try:
                config = config_of(config_class, shrink)
                module = prepared(_built(getattr(transformers, class_name), config))
            except Exception as error:
                yield _raising(error)
                continue
            for batch in itertools.islice(batches(module, config), 6):
                yield lambda module=module, batch=batch: Model(module, batch)


def _raising(error: Exception) -> Callable[[], Model]:
    def way() -> Model:
        raise error

    return way


def _built(cls: Any, config: Any) -> nn.Module:
    check_size(lambda: cls(config), MOST_PARAMETERS)
    torch.manual_seed(0)
    return cls(config)


# ---------------------------------------------------------------- configs


def config_of(cls: Any, shrink: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A config of the class with small fields."""
    config = cls.from_dict(shrink(cls().to_dict()))
    config._experts_implementation = "eager"  # the others compute in float32
    return config


def shortened(config: dict[str, Any]) -> dict[str, Any]:
    """Fewer layers, tokens and experts; other sizes as they are."""
    few = [fields for fields in FIELDS if fields[1] in (VOCABULARY, LAYERS, 4)]
    return _changed(config, [fields for fields in few if "attention_heads" not in fields[0]])


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """All fields of the table."""
    return _changed(config, FIELDS)


def expanded(config: dict[str, Any]) -> dict[str, Any]:
    """With heads twice as wide, for models whose inner width is twice that of the tokens."""
    return _changed(config, [(("head_dim", "d_head"), 2 * HIDDEN // HEADS), *FIELDS])


def _changed(config: dict[str, Any], fields: list[tuple[tuple[str, ...], int]]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    ids = itertools.count(VOCABULARY - 1, -1)
    layers = {value for key, value in config.items() if type(value) is int and value > 3 and key.endswith(DEPTHS)}
    layers -= {len(config.get("depths") or ())}  # these are stages
    small = itertools.count()
    for key, value in config.items():
        if not isinstance(key, str) or key in ("out_features", "out_indices", "stage_names"):
            continue
        if isinstance(value, dict):
            changed[key] = _rope(value) if key.startswith("rope") else _changed(_of_few_layers(value), fields)
        elif key in LISTS and isinstance(value, list) and all(type(each) is int for each in value):
            changed[key] = [max(1, each // LISTS[key]) for each in value]
        elif isinstance(value, list) and len(value) in layers:  # something for each layer: of two kinds, one of each
            changed[key] = [value[0], next((each for each in value if each != value[0]), value[0])]
        elif type(value) is int and key in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id"):
            changed[key] = next(small)  # an index of positions too, for some
        elif type(value) is int and key.endswith(("token_id", "token_index")):
            changed[key] = next(ids)
        elif value is None and key in MISSING:
            changed[key] = MISSING[key]
        elif type(value) is int and value > 0:
            changed[key] = next((size for ends, size in fields if key.endswith(ends)), value)
        else:
            changed[key] = value
    return changed


def _of_few_layers(config: dict[Any, Any]) -> dict[Any, Any]:
    """Without what is said of a layer, by its number, that is not there any more."""
    return {key: value for key, value in config.items() if not str(key).isdecimal() or int(key) < LAYERS}


def _rope(rope: dict[str, Any]) -> dict[str, Any]:
    """With sections for a head of this width, which some models have by default and others do not look at."""
    sections = [1, 1, 2] if rope.get("partial_rotary_factor") == 0.5 else [2, 3, 3]
    return rope | {"mrope_section": sections} if "rope_type" in rope else rope


# ---------------------------------------------------------------- inputs


def batches(module: nn.Module, config: Any) -> Iterator[dict[str, Tensor]]:
    """Arguments that may suit, the likeliest first: what is required, with more and more of what is not."""
    signature = inspect.signature(module.forward).parameters
    required = [name for name, each in signature.items() if each.default is each.empty and each.kind not in (2, 4)]
    main: Any = getattr(module, "main_input_name", "input_ids")
    mains = [main] if isinstance(main, str) else list(main)
    known = {name: list(values(name, config)) for name in signature}
    base = [name for name in dict.fromkeys([*mains[:1], *required]) if name in signature]
    more = [
        "attention_mask",
        "pixel_values",
        "input_ids",
        "decoder_input_ids",
        "input_features",
        "input_values",
        "bbox",
    ]
    extra = [name for name in more if known.get(name) and name not in base]
    subsets = [()] if "attention_mask" not in extra else [("attention_mask",), ()]
    others = [name for name in extra if name != "attention_mask"]
    subsets += [tuple(each) for n in (1, 2) for each in itertools.combinations(others, n)]
    if unknown := [name for name in base if not known[name]]:
        raise LeftOut(f"it needs {', '.join(unknown)}")
    for subset in subsets:
        chosen = [*base, *subset]
        for i in range(max((len(known[name]) for name in chosen), default=0)):
            yield {name: known[name][min(i, len(known[name]) - 1)] for name in chosen}


def values(name: str, config: Any) -> Iterator[Tensor]:
    """Tensors that an argument of this name may take."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    if name in ("input_ids", "decoder_input_ids", "entity_ids"):
        yield torch.randint(5, TOKENS, (ROWS, LENGTH), generator=generator)
    elif name in ("attention_mask", "decoder_attention_mask"):
        yield torch.ones(ROWS, LENGTH, dtype=torch.long)
    elif name == "bbox":
        yield torch.tensor([1, 2, 30, 40]).expand(ROWS, LENGTH, 4).clone()
    elif name in ("pixel_values", "pixel_values_videos"):
        channels, sizes = _image(config)
        for size in sizes:
            yield floats(channels, size, size)
        yield floats(_field(config, "num_frames", 2), channels, sizes[0], sizes[0])
        yield floats(_field(config, "num_images", 1), channels, sizes[0], sizes[0])
    elif name == "input_values":
        yield floats(4000)
        yield floats(1, 4000)
        yield floats(_field(config, "max_length", 64), _field(config, "num_mel_bins", 80))
        yield floats(32, _field(config, "num_mel_bins", 80))
    elif name == "input_features":
        mel = _field(config, "num_mel_bins", _field(config, "feature_size", 80))
        for frames in (2 * _field(config, "max_source_positions", 64), 64, 3000):
            yield floats(mel, frames)
            yield floats(frames, mel)
    elif name == "past_values":
        length, channels = _field(config, "context_length", 64), _field(config, "num_input_channels", 1)
        lags = max(getattr(config, "lags_sequence", None) or [0])
        yield floats(length, channels)
        yield floats(length + lags)
        yield floats(length)


def _image(config: Any) -> tuple[int, list[int]]:
    size: Any = _field(config, "image_size", 64)
    own = size[0] if isinstance(size, list | tuple) else size
    return _field(config, "num_channels", 3), list(dict.fromkeys([own, 64, 224]))


def _field(config: Any, name: str, default: Any) -> Any:
    """A field of a config, or of one inside it."""
    for each in (config, *(inner for inner in vars(config).values() if hasattr(inner, "to_dict"))):
        value = getattr(each, name, None)
        if isinstance(value, list | tuple) or (isinstance(value, int) and value > 0):
            return value
    return default
