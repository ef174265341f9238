"""The models of `models.py` in PyTorch: a step of training in float32 and under autocast."""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks import models


class _Block(nn.Module):
    """Attention and an MLP, each behind a normalization and beside a shortcut."""

    def __init__(self, width: int, is_causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.is_causal = is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, steps, 3, -1, models.HEAD_WIDTH)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, steps, width))
        return x + self.mlp(self.norms[1](x))


class _LSTM(nn.Module):
    """An LSTM that returns all of its outputs, or the last one."""

    def __init__(self, width: int, is_last: bool) -> None:
        super().__init__()
        self.lstm, self.is_last = nn.LSTM(width, width, batch_first=True), is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.lstm(x)[0]
        return outputs[:, -1] if self.is_last else outputs


class _Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, filters: int, strides: int) -> None:
        super().__init__()
        first = _convolved(inputs, filters, 3, strides)
        self.body = nn.Sequential(*first, nn.ReLU(), *_convolved(filters, filters, 3, 1))
        shortcut = [] if strides == 1 else _convolved(inputs, filters, 1, strides)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _Mean(nn.Module):
    """A mean over some axes."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.axes)


def _convolved(inputs: int, filters: int, size: int, strides: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, filters, size, strides, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(filters)]


def layers_of(name: str, sizes: models.Sizes) -> tuple[list[nn.Module], int]:
    """The layers before the head, and how many features they give."""
    blocks, width = sizes.blocks, sizes.width
    if name == "MLP":
        return [
            layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.ReLU())
        ], width
    if name == "LSTM":
        return [_LSTM(width, is_last=i == blocks - 1) for i in range(blocks)], width
    if name == "ResNet":
        layers, filters = [*_convolved(3, width, 3, 1), nn.ReLU()], width
        for after, strides in models.resnet_blocks(blocks, width):
            layers.append(_Residual(filters, after, strides))
            filters = after
        return [*layers, _Mean(2, 3)], filters
    is_causal = name == "language model"
    layers = [nn.Embedding(sizes.classes, width)]
    layers += [_Block(width, is_causal) for _ in range(blocks)]
    layers += [nn.LayerNorm(width), *([] if is_causal else [_Mean(1)])]
    return layers, width


def make_step(name: str, sizes: models.Sizes, autocast: bool) -> Callable[[], float]:
    """A function that makes one step of training with Adam."""
    layers, width = layers_of(name, sizes)
    model = nn.Sequential(*layers, nn.Linear(width, sizes.classes))
    shape = {
        "MLP": [sizes.width],
        "ResNet": [3, sizes.steps, sizes.steps],
        "LSTM": [sizes.steps, sizes.width],
    }.get(name)
    if shape is None:
        x = torch.randint(sizes.classes, [sizes.batch, sizes.steps])
    else:
        x = torch.randn([sizes.batch, *shape])
    of_labels = [sizes.batch, sizes.steps] if name == "language model" else [sizes.batch]
    y = torch.randint(sizes.classes, of_labels)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=True)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(x)
        outputs = outputs.float().reshape(-1, sizes.classes)
        loss = nn.functional.cross_entropy(outputs, y.reshape(-1))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
