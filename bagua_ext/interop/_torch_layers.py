"""The table of torch's layers: what each is in every framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bagua_ext.interop.layout import Layout
from bagua_ext.interop.listing import Layer

_ZERO_PADDING = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


def list_layers(model: nn.Module) -> Iterator[Layer]:
    """Yields the layers that have tensors, in order of registration."""
    padded: tuple[int, ...] = ()
    for path, module in model.named_modules():
        tensors = _tensors(module)
        if any(nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
            raise ValueError(f"layer '{path}' has no shapes yet: run a batch through the model")
        if tensors:
            yield from _listed(module, path, padded)
        is_leaf = next(module.children(), None) is None
        if is_leaf:
            padded = tuple(module.padding) if isinstance(module, _ZERO_PADDING) else ()


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the module's own parameters and the buffers that a checkpoint holds."""
    buffers = {
        name: buffer
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return {k: v for k, v in (module._parameters | buffers).items() if v is not None}


def _listed(module: nn.Module, path: str, padded: tuple[int, ...]) -> Iterator[Layer]:
    for kind, make in _TABLE.items():
        if isinstance(module, kind):
            layers = list(make(module, path))
            if _holds_all(layers, module):
                _add_padding(layers[0], padded)
                yield from layers
                return
    yield _unknown(module, path)


def _holds_all(layers: list[Layer], module: nn.Module) -> bool:
    """False if the module has tensors that the table knows nothing of, e.g. parametrized ones."""
    known = {id(t) for layer in layers for e in layer.entries for t in (e.holder, e.folded)}
    own = {k: t for k, t in _tensors(module).items() if k != "num_batches_tracked"}
    return {id(t) for t in own.values()} == known - {id(None)}


def _unknown(module: nn.Module, path: str) -> Layer:
    name = type(module).__name__
    layer = Layer(name.lower(), path)
    layer.problem = (
        f"layer '{path}' ({name}) cannot be tied to another framework's: it is not in the table of "
        "layers that they share, or has arguments that are not. Build the model of other layers; "
        "names= can leave out what is not trained."
    )
    for own, tensor in _tensors(module).items():
        layer.add(own, _join(path, own), tensor, Layout.same(tuple(tensor.shape)))
    return layer


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _add(layer: Layer, module: nn.Module, pairs: dict[str, str], **more: Any) -> None:
    """Adds the module's tensors; ``pairs`` maps their own names to canonical ones."""
    for own, name in pairs.items():
        tensor = getattr(module, own, None)
        if tensor is not None:
            path = _join(layer.own, own)
            layer.add(name, path, tensor, Layout.same(tuple(tensor.shape)), **more)


# ---- Layers -------------------------------------------------------------------------------------


def _dense(module: nn.Linear, path: str) -> Iterator[Layer]:
    layer = Layer("dense", path)
    _add(layer, module, {"weight": "kernel", "bias": "bias"})
    yield layer


def _embedding(module: nn.Embedding, path: str) -> Iterator[Layer]:
    layer = Layer("embedding", path)
    _add(layer, module, {"weight": "embeddings"})
    options = ("padding_idx", "max_norm")
    layer.settings = {k: v for k in options if (v := getattr(module, k)) is not None}
    if module.scale_grad_by_freq:
        layer.settings["scale_grad_by_freq"] = True
    yield layer


def _conv(module: Any, path: str) -> Iterator[Layer]:
    rank = len(module.kernel_size)
    layer = Layer(f"conv{rank}d", path, settings=_conv_settings(module))
    _add(layer, module, {"weight": "kernel", "bias": "bias"})
    layer.facts["padding"] = [_sides(module, axis) for axis in range(rank)]
    yield layer


def _conv_transpose(module: Any, path: str) -> Iterator[Layer]:
    rank = len(module.kernel_size)
    layer = Layer(f"conv{rank}d_transpose", path, settings=_conv_settings(module))
    _add(layer, module, {"weight": "kernel", "bias": "bias"})
    pairs = zip(module.padding, module.output_padding, strict=True)
    layer.facts["cropping"] = [(cut, cut - more) for cut, more in pairs]
    yield layer


def _conv_settings(module: Any) -> dict[str, Any]:
    settings = {
        "strides": tuple(module.stride),
        "dilation": tuple(module.dilation),
        "groups": module.groups,
    }
    if module.padding_mode != "zeros":
        settings["padding_mode"] = module.padding_mode
    return settings


def _sides(module: Any, axis: int) -> tuple[int, int]:
    """Returns the zeros before and after one spatial axis."""
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = (module.kernel_size[axis] - 1) * module.dilation[axis]
        return total // 2, total - total // 2
    return module.padding[axis], module.padding[axis]


def _add_padding(layer: Layer, padded: tuple[int, ...]) -> None:
    """Adds the zeros of the module before a convolution; torch lists the last axis first."""
    sides = layer.facts.get("padding")
    if sides and len(padded) == 2 * len(sides):
        pairs = reversed([padded[i : i + 2] for i in range(0, len(padded), 2)])
        layer.facts["padding"] = [
            (a + left, b + right) for (a, b), (left, right) in zip(sides, pairs, strict=True)
        ]


def _batch_norm(module: Any, path: str) -> Iterator[Layer]:
    layer = Layer("batch_norm", path, settings={"epsilon": module.eps})
    average = module.momentum
    layer.settings["momentum"] = "cumulative" if average is None else 1.0 - average
    _add(layer, module, {"weight": "gamma", "bias": "beta"})
    _add(layer, module, {"running_mean": "moving_mean", "running_var": "moving_variance"})
    yield layer


def _layer_norm(module: nn.LayerNorm, path: str) -> Iterator[Layer]:
    layer = Layer("layer_norm", path, settings={"epsilon": module.eps})
    _add(layer, module, {"weight": "gamma", "bias": "beta"})
    yield layer


def _group_norm(module: nn.GroupNorm, path: str) -> Iterator[Layer]:
    layer = Layer("group_norm", path)
    layer.settings = {"epsilon": module.eps, "groups": module.num_groups}
    _add(layer, module, {"weight": "gamma", "bias": "beta"})
    yield layer


def _recurrent(kind: str) -> Callable[[Any, str], Iterator[Layer]]:
    """Layers of one nn.RNN, LSTM or GRU: one for each of its ``num_layers``.

    An LSTM's two biases, which only ever add up, are one canonical bias; a GRU needs both.
    """

    def make(module: Any, path: str) -> Iterator[Layer]:
        for number in range(module.num_layers):
            layer = Layer(kind, path if module.num_layers == 1 else f"{path}[{number}]")
            layer.settings["bidirectional"] = module.bidirectional
            if kind == "simple_rnn":
                layer.settings["activation"] = module.nonlinearity
            for suffix, prefix in _directions(module, number):
                _add_cell(layer, module, path, suffix, prefix)
            yield layer

    return make


def _directions(module: Any, number: int) -> list[tuple[str, str]]:
    forward = [(f"l{number}", "")]
    return forward + ([(f"l{number}_reverse", "backward_")] if module.bidirectional else [])


def _add_cell(layer: Layer, module: Any, path: str, suffix: str, prefix: str) -> None:
    kernels = {"weight_ih": "kernel", "weight_hh": "recurrent_kernel"}
    folds = not isinstance(module, nn.GRU)
    biases = {"bias_ih": "bias"} if folds else {"bias_ih": "bias", "bias_hh": "recurrent_bias"}
    for own, name in (kernels | biases).items():
        tensor = getattr(module, f"{own}_{suffix}", None)
        if tensor is None:
            continue
        folded = getattr(module, f"bias_hh_{suffix}") if own == "bias_ih" and folds else None
        layout = Layout.same(tuple(tensor.shape))
        full = _join(path, f"{own}_{suffix}")
        layer.add(prefix + name, full, tensor, layout, folded=folded)


# The first kind that fits counts; a layer with tensors that it does not list is unknown.
_TABLE: dict[type[nn.Module], Callable[[Any, str], Iterator[Layer]]] = {
    nn.Linear: _dense,
    nn.Embedding: _embedding,
    nn.Conv1d: _conv,
    nn.Conv2d: _conv,
    nn.Conv3d: _conv,
    nn.ConvTranspose1d: _conv_transpose,
    nn.ConvTranspose2d: _conv_transpose,
    nn.ConvTranspose3d: _conv_transpose,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.SyncBatchNorm: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.LSTM: _recurrent("lstm"),
    nn.GRU: _recurrent("gru"),
    nn.RNN: _recurrent("simple_rnn"),
}
