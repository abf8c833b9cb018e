"""One small instance of every family of public model libraries, as `families.py` tries them.

    libraries()                 the libraries, each with a function that lists its families
    built(library, family)      the module, whose forward returns a loss, with a batch as `example_inputs`

A family is a module of timm, torchvision or pytorchcv, a model type of transformers, and a class of the others. Its
instance is the one whose name says that it is the smallest. The loss is the mean square of everything that a model
returns, so that all of it has gradients.
"""

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

import torch
from family_instances import INSTANCES, VIT, Call, graph_layer, graph_layers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["built", "libraries"]

BATCH = 4
SMALLEST = ("test", "zepto", "atto", "femto", "pico", "nano", "xxs", "xx_small", "xs", "x_small", "micro", "tiny",
            "mini", "small", "lite", "_s", "18", "b0", "11", "50", "base")
"""What names of small models have in them, the smallest first."""

CAPS = {"hidden_size": 64, "d_model": 64, "dim": 64, "n_embd": 64, "embed_dim": 64, "hidden_dim": 64,
        "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "n_inner": 128, "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2,
        "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 256, "image_size": 64, "patch_size": 16, "num_experts": 4, "num_local_experts": 4,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "max_position_embeddings": 128}
"""The greatest values of a configuration of transformers."""
HEADS = {name for name in CAPS if "head" in name}
DEPTHS = {name for name in CAPS if "layers" in name or name in ("n_layer", "vocab_size")}
RUNGS = (set(CAPS), set(CAPS) - {"head_dim"}, set(CAPS) - HEADS, DEPTHS)
"""What is capped; the first with which a model runs is taken, as some sizes of a model follow from others."""
MOST = 80e6
"""Parameters of a small instance."""


class Squares(nn.Module):
    """A model behind the mean square of all that it returns."""

    def __init__(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        self.fixed = {name: value for name, value in kwargs.items() if name not in tensors}
        self.model, self.args, self.names = model, len(args), tuple(tensors)
        self.batch = (*args, *tensors.values())

    def example_inputs(self) -> tuple[Tensor, ...]:
        """The batch, as arguments of one call."""
        return self.batch

    def forward(self, *inputs: Tensor) -> Tensor:
        found = self.model(*inputs[:self.args], **dict(zip(self.names, inputs[self.args:], strict=True)), **self.fixed)
        every = [x for x in pytree.tree_leaves(_plain(found)) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.float().square().mean() for x in every if x.requires_grad or not x.is_leaf]).sum()


def _plain(found: Any) -> Any:
    """Outputs of transformers as tuples; caches of keys and values are left out."""
    if hasattr(found, "to_tuple"):
        return [value for name, value in found.items() if name != "past_key_values"]
    return found


def _smallest(names: Iterable[str]) -> str:
    """The name of what seems to be the smallest model."""
    def rank(name: str) -> tuple[int, int, str]:
        return next((i for i, word in enumerate(SMALLEST) if word in name), len(SMALLEST)), len(name), name

    return min(names, key=rank)


def _by_module(functions: Iterable[tuple[str, Any]]) -> dict[str, list[str]]:
    """Names of models by the module that makes them."""
    found = defaultdict[str, list[str]](list)
    for name, function in functions:
        found[inspect.unwrap(function).__module__.rpartition(".")[2]].append(name)
    return dict(found)


def _images(size: tuple[int, ...] = (3, 224, 224)) -> Tensor:
    return torch.randn(BATCH, *size)


def _timm_families() -> dict[str, str]:
    timm = importlib.import_module("timm")
    return {family: _smallest(timm.list_models(module=family)) for family in timm.list_modules()
            if timm.list_models(module=family)}


def _timm(name: str) -> nn.Module:
    timm = importlib.import_module("timm")
    model = timm.create_model(name)
    return Squares(model, _images(model.default_cfg.get("input_size", (3, 224, 224))))


def declared_torchvision() -> Any:
    """torchvision, which other libraries read as well, or None where it is not installed.

    Operators of one that is built for another torch are declared; its classifiers need none.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(40):
        try:
            return importlib.import_module("torchvision")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None:
                raise
            library.define(f"{missing[1]}(Tensor x) -> Tensor")
            KEPT.append(library)
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]
    raise ImportError("torchvision needs operators of its own")


KEPT: list[Any] = []
"""Libraries of operators, which live as long as they are kept."""


def _torchvision_families() -> dict[str, str]:
    models = declared_torchvision().models
    plain = [name for name in models.list_models() if not name.startswith(("quantized", "raft"))]
    found = _by_module((name, models.get_model_builder(name)) for name in plain)
    return {family: _smallest(names) for family, names in found.items()}


def _torchvision(name: str) -> nn.Module:
    models = declared_torchvision().models
    video = "video" in inspect.unwrap(models.get_model_builder(name)).__module__
    backbone = "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters
    model = models.get_model(name, weights=None, **{"weights_backbone": None} if backbone else {})
    return Squares(model, _images((3, 16, 112, 112) if video else (3, 224, 224)))


def _pytorchcv_families() -> dict[str, str]:
    provider = importlib.import_module("pytorchcv.model_provider")
    return {family: names[0] for family, names in _by_module(provider._models.items()).items()}


def _pytorchcv(name: str) -> nn.Module:
    model = importlib.import_module("pytorchcv.model_provider").get_model(name)
    channels, size = getattr(model, "in_channels", 3), getattr(model, "in_size", (224, 224))
    return Squares(model, _images((channels, *size)))


def _segmentation_families() -> dict[str, str]:
    library = importlib.import_module("segmentation_models_pytorch")
    return {name: name for name in ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "PAN", "DeepLabV3",
                                    "DeepLabV3Plus", "UPerNet", "Segformer") if hasattr(library, name)}


def _segmentation(name: str) -> nn.Module:
    library = importlib.import_module("segmentation_models_pytorch")
    return Squares(getattr(library, name)("resnet18", encoder_weights=None), _images((3, 128, 128)))


ARGUMENTS = {"image_size": 64, "image_height": 64, "image_width": 64, "patch_size": 16, "image_patch_size": 16,
             "num_classes": 10, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128, "dim_head": 16, "seq_len": 64,
             "frames": 4, "frame_patch_size": 2, "num_patches": 16, "spatial_depth": 1, "temporal_depth": 1,
             "max_seq_len": 64, "num_tokens": 64, "cls_depth": 1, "mlp_mult": 2, "sm_dim": 64, "lg_dim": 64,
             "num_hierarchies": 2, "block_repeats": 2, "freq_patch_size": 8, "num_residual_streams": 2,
             "max_tokens_per_depth": (12, 8), "num_slots": 4, "decoder_dim": 64, "masking_ratio": 0.5}
"""What constructors are given by the names of their parameters, where these have no value or are in this table."""
INNER = ("vit", "encoder", "net", "image_net")
"""Names of a model inside another, which is a small ViT."""


def _vit_families() -> dict[str, str]:
    """The last class of every file."""
    library, found = importlib.import_module("vit_pytorch"), {}
    for one in pkgutil.iter_modules(library.__path__):
        try:
            module = importlib.import_module(f"vit_pytorch.{one.name}")
        except ImportError:
            continue
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)
                   and issubclass(value, nn.Module) and value.__module__ == module.__name__]
        if classes:
            found[one.name] = f"{one.name}.{classes[-1]}"
    return found


def _vit(name: str) -> nn.Module:
    module, _, kind = name.partition(".")
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), kind)
    if module in VIT:
        options, side = VIT[module]
        return Squares(model(**options), _images((3, side, side)))
    parameters = inspect.signature(model).parameters
    chosen = {one: 1 if module == "vit_1d" and one == "channels" else ARGUMENTS[one] for one in parameters
              if one in ARGUMENTS}
    for one in INNER:
        if one in parameters:
            chosen[one] = _vit("vit.ViT").model
    shape = (3, 64) if "seq_len" in chosen else (3, 4, 64, 64) if "frames" in chosen else (3, 64, 64)
    return Squares(model(**chosen), _images(shape))


def _decoders() -> dict[str, str]:
    """Decoders and encoders of x_transformers, by the options that papers are named after."""
    return {name: name for name in (
        "plain", "rotary_pos_emb", "alibi_pos_bias", "rel_pos_bias", "use_rmsnorm", "ff_glu", "ff_swish",
        "attn_qk_norm", "attn_pre_talking_heads", "attn_post_talking_heads",
        "attn_one_kv_head", "residual_attn", "macaron", "gate_residual",
        "scale_residual", "sandwich_norm", "shift_tokens", "attn_gate_values", "attn_on_attn", "use_scalenorm",
        "attn_value_rmsnorm", "ff_relu_squared", "dynamic_pos_bias", "use_simple_rmsnorm",
        "rotary_xpos", "polar_pos_emb", "weight_tie_layers", "add_value_residual", "use_dynamic_tanh",
        "attn_cog_signed", "attn_softclamp_logits", "attn_add_zero_kv", "attn_laser", "attn_selective",
        "num_residual_streams")}


def _decoder(name: str) -> nn.Module:
    library = importlib.import_module("x_transformers")
    option = {} if name == "plain" else {name: 2 if name == "num_residual_streams" else True}
    layers = library.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **option)
    model = library.TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)
    return Squares(model, torch.randint(256, (BATCH, 32)))


def _transformers_families() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
    return {family: family for family in MODEL_MAPPING_NAMES}


def _capped(config: Any, names: Collection[str]) -> Any:
    """The configuration with small values of the `names`, those of its parts too."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            _capped(value, names)
        elif name in names and value is None and "expert" in name:  # a default with which no model can be built
            setattr(config, name, CAPS[name])
        elif name in names and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, CAPS[name]))
        elif name.endswith("layerdrop"):
            setattr(config, name, 0.0)  # a draw would decide a branch
        elif name in ("layer_types", "mlp_layer_types") and isinstance(value, list):
            setattr(config, name, value[:2])
    if "head_dim" not in names and hasattr(config, "num_key_value_heads"):  # as many as heads, for latent attention
        config.num_key_value_heads = getattr(config, "num_attention_heads", config.num_key_value_heads)
    if isinstance(pad := getattr(config, "pad_token_id", None), int):
        config.pad_token_id = min(pad, (getattr(config, "vocab_size", None) or pad + 1) - 1)
    return config


def _transformers(name: str) -> nn.Module:
    """The first model, with the first batch that it takes, of those whose configurations are capped ever less."""
    first: Exception | None = None
    for names in RUNGS:
        try:
            return _instance(name, names)
        except Exception as error:
            first = first or error
    assert first is not None
    raise first


def _instance(name: str, capped: Collection[str]) -> nn.Module:
    """A model whose configuration is capped in these names, with the first batch that it takes."""
    transformers: Any = importlib.import_module("transformers")
    config = _capped(transformers.AutoConfig.for_model(name), capped)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    size = 0
    with suppress(TypeError), torch.device("meta"):  # some constructors do not work there
        size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size / 1e6:.0f} million parameters are more than {MOST / 1e6:.0f}")
    model = transformers.AutoModel.from_config(config)
    main = {model.main_input_name: _input(model.main_input_name, config)}
    if config.is_encoder_decoder and model.main_input_name != "pixel_values":
        main["decoder_input_ids"] = _input("input_ids", config)
    taken = [one for one in ("pixel_values", "bbox", "input_ids") if one in inspect.signature(model.forward).parameters]
    batches = [main, *({**main, one: _input(one, config)} for one in taken if one not in main)]
    if "input_values" in main:
        batches.append({"input_values": main["input_values"].unsqueeze(1)})  # codecs of sound have a channel
    for batch in batches[:-1]:
        with suppress(Exception), torch.no_grad():
            model(**batch)
            return Squares(model, **batch)
    with torch.no_grad():
        model(**batches[-1])
    return Squares(model, **batches[-1])


def _input(name: str, config: Any) -> Tensor:
    """A batch of tokens, boxes, images, waves or spectra."""
    if name == "input_ids":
        config = getattr(config, "text_config", config)
        return torch.randint(4, min(getattr(config, "vocab_size", 64) or 64, 64), (BATCH, 16))
    if name == "bbox":
        return torch.tensor([1, 2, 30, 40]).expand(BATCH, 16, 4).clone()
    if name == "pixel_values":
        config = getattr(config, "vision_config", config)
        size = getattr(config, "image_size", 64)
        sides = size if isinstance(size, list | tuple) else (size, size)
        return _images((getattr(config, "num_channels", 3), *sides))
    if name == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return torch.randn(BATCH, config.max_length, config.num_mel_bins)
    if name == "input_values":
        return torch.randn(BATCH, 4000)
    if name == "input_features":
        return torch.randn(BATCH, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 50))
    raise NotImplementedError(f"no batch is made for the input {name!r}")


def _graphs(name: str) -> nn.Module:
    return _squares(graph_layer(name))


def _squares(call: Call) -> nn.Module:
    model, args, kwargs = call
    return Squares(model, *args, **kwargs)


def _written(library: str) -> "Library":
    """Families whose instances are written out; of `packages`, their names say which module is imported."""
    known = INSTANCES[library]

    def families() -> dict[str, str]:
        return {name: name for name in known if importlib.util.find_spec(_module(library, name).partition(".")[0])}

    return families, lambda name: _squares(known[name](importlib.import_module(_module(library, name))))


def _module(library: str, name: str) -> str:
    return {"monai": "monai.networks.nets", "diffusers": "diffusers"}.get(library, name.partition(" ")[0])


Library = tuple[Callable[[], dict[str, str]], Callable[[str], nn.Module]]
LIBRARIES: dict[str, Library] = {
    "timm": (_timm_families, _timm), "torchvision": (_torchvision_families, _torchvision),
    "transformers": (_transformers_families, _transformers), "pytorchcv": (_pytorchcv_families, _pytorchcv),
    "segmentation_models_pytorch": (_segmentation_families, _segmentation), "vit_pytorch": (_vit_families, _vit),
    "x_transformers": (_decoders, _decoder), "torch_geometric": (graph_layers, _graphs),
    **{library: _written(library) for library in INSTANCES}}


def libraries(names: Iterable[str] = ()) -> dict[str, dict[str, str]]:
    """The smallest model of every family, by library; a library that cannot be imported is named and left out."""
    found = {}
    declared_torchvision()
    for library in names or LIBRARIES:
        try:
            found[library] = LIBRARIES[library][0]()
        except ImportError as error:
            print(f"{library} is left out: {error}")
    return found


def built(library: str, model: str) -> nn.Module:
    """The model of a library, with a loss and `example_inputs`."""
    declared_torchvision()
    torch.manual_seed(0)
    return LIBRARIES[library][1](model).train()
