# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 on a GPU in bfloat16, and its data; small_nets.py has nets for CPUs."""

from __future__ import annotations

from collections.abc import Callable

import resnet50
import torch
from small_nets import Task
from torch import Tensor, nn

_BATCH, _DIFFERENT = 256, 8  # images in a batch; different images, which are repeated


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions plus a shortcut (He et al., 2015); the 3x3 one has the
    stride."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * planes
        self.body = nn.Sequential(
            *_convolution(inputs, planes, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(planes, planes, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(planes, outputs, 1, 1),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, width: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, width, stride, width // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def resnet() -> nn.Module:
    """ResNet-50 on the GPU, channels last, with the parameters of resnet50.shapes()."""
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, planes, stride if block == 0 else 1))
            channels = 4 * planes
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    net = nn.Sequential(*layers)
    assert [tuple(p.shape) for p in net.parameters()] == resnet50.shapes()
    to: Callable[..., nn.Module] = net.to  # its types lack memory_format
    return to("cuda", memory_format=torch.channels_last)


def _images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn((_DIFFERENT, 3, 224, 224), generator=generator).cuda()
    y = torch.randint(1000, (_DIFFERENT,), generator=generator).cuda()
    x = x.repeat(_BATCH // _DIFFERENT, 1, 1, 1).contiguous(memory_format=torch.channels_last)
    return x, y.repeat(_BATCH // _DIFFERENT)


class MixedTask(Task):
    """A task whose forward pass is in bfloat16 and whose weights are float32."""

    def loss(self, net: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return super().loss(net, data)


RESNET = MixedTask("ResNet-50, bf16", "images", _BATCH, resnet, _images)
