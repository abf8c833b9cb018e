"""Defines samples: the arguments of one call of a model, which fix shapes and dtypes, never values.

A sample is written as JSON (`describe`), so that a plan can hold it and a later process can capture the same graph:

    {"args": [...], "kwargs": {"ids": {"tensor": [8, 128], "dtype": "int64"}, "use_cache": false}}

and lists, tuples and dicts inside are {"list": [...]}, {"tuple": [...]}, {"dict": {...}}. Dataclasses and named tuples
are {"fields": {...}}, without their class: a process that has the plan alone captures the model with `Fields`. A block
mask of FlexAttention is {"block_mask": text, ...} (`block_masks`).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoddl.capture.block_masks import WrittenMask, described_mask, mask_from_spec, with_written_masks
from autoddl.core.errors import CaptureError, InputError

__all__ = ["Fields", "Sample", "as_sample", "describe", "from_spec", "named", "parted", "rows_of", "sample_for"]

LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
CLASSES = ("ForImageClassification", "ForSequenceClassification")
HELP = "pass sample=, the arguments of one call: a tensor, a tuple of arguments, a dict of keywords or a Sample"


@dataclass(frozen=True)
class Sample:
    """The arguments of a call `model(*args, **kwargs)`: tensors, and plain None, bool, int, float or str."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Fields:
    """Values by name and by position, as dataclasses and named tuples have them: `batch.x`, `batch[0]`, `x, y = batch`.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())

    def __len__(self) -> int:
        return len(vars(self))

    def __getitem__(self, k: int) -> Any:
        return tuple(self)[k]


pytree.register_pytree_node(
    Fields, lambda one: (list(one), tuple(vars(one))),
    lambda values, names: Fields(dict(zip(names, values, strict=True))), serialized_type_name="autoddl.Fields",
    flatten_with_keys_fn=lambda one: ([(pytree.GetAttrKey(name), x) for name, x in vars(one).items()],
                                      tuple(vars(one))))


def as_sample(value: object) -> Sample:
    """A Sample from a Sample, a tensor, a tuple of arguments, a dict of keywords, or a dataclass, which is an argument.

    Classes of dataclasses inside become known to torch's pytrees, as torch.export needs it.
    """
    match value:
        case Sample():
            made = value
        case Tensor() | Fields():
            made = Sample((value,))
        case tuple() | list():
            made = Sample(tuple(value))
        case Mapping():
            made = Sample((), dict(value))
        case _ if _is_record(value):
            made = Sample((value,))
        case _:
            raise InputError(f"{type(value).__name__} is no sample; {HELP}")
    for leaf in pytree.tree_leaves((made.args, dict(made.kwargs)), is_leaf=_is_record):
        _register(leaf)
    return Sample(*with_written_masks((made.args, dict(made.kwargs))))


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def _register(value: Any) -> None:
    """Makes the class of a dataclass known to torch's pytrees, and those of its fields."""
    if _is_record(value):
        if type(value) not in pytree.SUPPORTED_NODES:
            torch.export.register_dataclass(type(value))
        for one in fields(value):
            for leaf in pytree.tree_leaves(getattr(value, one.name), is_leaf=_is_record):
                _register(leaf)


def sample_for(model: nn.Module) -> Sample:
    """The sample that the model itself offers: `example_inputs()`, or the dummy inputs of a Hugging Face model."""
    example = getattr(model, "example_inputs", None)
    if callable(example):
        return as_sample(example())
    if hasattr(model, "dummy_inputs") and hasattr(model, "config"):
        return _huggingface(model)
    raise InputError(f"{type(model).__name__} has no example_inputs() method; {HELP}. A factory returns them "
                     "behind the module")


def _huggingface(model: Any) -> Sample:
    """The model's dummy inputs with labels added, so that it returns a loss."""
    name, config = type(model).__name__, model.config
    inputs: dict[str, Any] = {key: value for key, value in model.dummy_inputs.items() if isinstance(value, Tensor)}
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {"pixel_values": torch.zeros(2, config.num_channels, height, width)}
    first = next(iter(inputs.values()))
    if name.endswith(LANGUAGE):
        inputs["labels"] = inputs.get("decoder_input_ids", first).clone()
    elif name.endswith(CLASSES):
        inputs["labels"] = torch.zeros(first.shape[0], dtype=torch.int64)
    else:
        raise InputError(f"no labels are known for {name}, and without them it has no loss; {HELP}")
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return Sample((), inputs)


def rows_of(leaf: Tensor, part: int, parts: int) -> Tensor:
    """Rows of dim 0 that microbatch `part` of `parts` reads, a view; a scalar is read by all."""
    return leaf.narrow(0, part * (leaf.shape[0] // parts), leaf.shape[0] // parts) if leaf.dim() else leaf


def parted(sample: Sample, parts: int, part: int = 0) -> Sample:
    """Microbatch `part` of `parts` equal ones: the batch cut along dim 0 of every tensor.

    Raises InputError where the tensors are not equally long there, or not a multiple of `parts`."""
    if parts == 1:
        return sample
    leaves, tree = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or any(size % parts for size in sizes):
        found = ", ".join(map(str, sorted(sizes))) or "none"
        raise InputError(f"{parts} microbatches cut dim 0 of every input evenly; the inputs have sizes {found} there: "
                         f"give a batch of a multiple of {parts}, or take another number of microbatches")
    cut = [rows_of(leaf, part, parts) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(cut, tree)
    return Sample(args, kwargs)


def named(forward: Callable[..., Any], sample: Sample) -> dict[str, Any]:
    """The leaves of a call by name: the parameter of `forward` and the path inside it: `ids`, `batch.x`, `args.0`."""
    signature = inspect.signature(forward)
    try:
        bound = signature.bind(*sample.args, **sample.kwargs)
    except TypeError as error:
        raise CaptureError(f"the sample does not fit forward{signature}: {error}") from None
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        variadic = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        arguments.update(value if variadic else {name: value})
    leaves, _ = pytree.tree_flatten_with_path(arguments)
    return {".".join(_step(key) for key in path): leaf for path, leaf in leaves}


def _step(key: Any) -> str:
    return str(next(getattr(key, part) for part in ("key", "idx", "name") if hasattr(key, part)))


def describe(sample: Sample) -> dict[str, Any]:
    """The sample as JSON: shapes, dtypes, structure and plain values."""
    return {"args": [_write(value) for value in sample.args],
            "kwargs": {key: _write(value) for key, value in sample.kwargs.items()}}


def from_spec(spec: Mapping[str, Any], device: torch.device | str = "cpu") -> Sample:
    """The described sample, of zeros; on device `meta` it takes no memory."""
    return Sample(tuple(_read(value, device) for value in spec["args"]),
                  {key: _read(value, device) for key, value in spec["kwargs"].items()})


def _write(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor():
            return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        case WrittenMask():
            return {**described_mask(value), "read": [_write(part) for part in value.read]}
        case Fields():
            return {"fields": {name: _write(part) for name, part in vars(value).items()}}
        case tuple() if hasattr(value, "_fields"):
            return {"fields": {name: _write(part) for name, part in zip(value._fields, value, strict=True)}}
        case list() | tuple():
            return {"list" if isinstance(value, list) else "tuple": [_write(part) for part in value]}
        case Mapping():
            return {"dict": {str(key): _write(part) for key, part in value.items()}}
        case _ if _is_record(value):
            return {"fields": {one.name: _write(getattr(value, one.name)) for one in fields(value)}}
    raise InputError(f"a sample holds tensors, lists, tuples, dicts, dataclasses and plain values, not "
                     f"{type(value).__name__}")


def _read(value: Any, device: torch.device | str) -> Any:
    match value:
        case {"tensor": shape, "dtype": dtype}:
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        case {"list": parts}:
            return [_read(part, device) for part in parts]
        case {"tuple": parts}:
            return tuple(_read(part, device) for part in parts)
        case {"dict": parts}:
            return {key: _read(part, device) for key, part in parts.items()}
        case {"block_mask": str(), "read": parts}:
            return mask_from_spec(value, [_read(part, device) for part in parts])
        case {"fields": parts}:
            return Fields({key: _read(part, device) for key, part in parts.items()})
    return value
