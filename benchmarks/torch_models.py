"""The models of `models.py` in PyTorch: a step of training in float32 and under autocast."""

import json
import sys

import torch
from torch import nn

from benchmarks import common, models

REPEATS = 15


class _LastStep(nn.Module):
    def __init__(self, features, width):
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class _Residual(nn.Module):
    def __init__(self, inputs, filters, strides):
        super().__init__()
        first = _convolve(inputs, filters, 3, strides)
        self.body = nn.Sequential(*first, nn.ReLU(), *_convolve(filters, filters, 3, 1))
        shortcut = [] if strides == 1 else _convolve(inputs, filters, 1, strides)
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


class _Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class _Mean(nn.Module):
    def __init__(self, axes):
        super().__init__()
        self.axes = axes

    def forward(self, x):
        return x.mean(self.axes)


def _convolve(inputs, filters, size, strides):
    convolution = nn.Conv2d(inputs, filters, size, strides, size // 2, bias=False)
    return [convolution, nn.BatchNorm2d(filters)]


def _mlp():
    return [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.ReLU())], 2048


def _resnet():
    blocks = [_Residual(32, 32, 1), _Residual(32, 64, 2), _Residual(64, 128, 2)]
    return [*_convolve(3, 32, 3, 1), nn.ReLU(), *blocks, _Mean((2, 3))], 128


def _transformer():
    blocks = [_Block(256, 4), _Block(256, 4)]
    return [nn.Embedding(models.VOCABULARY, 256), *blocks, nn.LayerNorm(256), _Mean(1)], 256


def _lstm():
    return [_LastStep(128, 512)], 512


MODELS = {"MLP": _mlp, "ResNet": _resnet, "transformer": _transformer, "LSTM": _lstm}


def make_step(name: str, autocast: bool, batch: int | None = None):
    """A function that makes one step of training, as `fit` does."""
    _, default_batch, shape = models.MODELS[name]
    shape = [batch or default_batch, *shape]
    if name == "transformer":
        x = torch.randint(models.VOCABULARY, shape)
    else:
        x = torch.randn(shape)
        x = x.movedim(-1, 1).contiguous() if name == "ResNet" else x
    y = torch.randint(models.CLASSES, shape[:1])
    layers, width = MODELS[name]()
    features, head = nn.Sequential(*layers), nn.Linear(width, models.CLASSES)
    optimizer = torch.optim.Adam([*features.parameters(), *head.parameters()], foreach=True)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = features(x)
        nn.functional.cross_entropy(head(outputs.float()), y).backward()
        optimizer.step()

    return step


def measure(name: str) -> dict[str, list[float]]:
    """Seconds a step, in float32 and under autocast."""
    steps = {
        "float32": make_step(name, autocast=False),
        "autocast bfloat16": make_step(name, autocast=True),
    }
    return common.interleaved(steps, REPEATS)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
