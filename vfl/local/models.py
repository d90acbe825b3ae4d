"""Local models (torch): MLP, small CNN, small ResNet, ResNet-18, with the pooled output of every block for parallel
LoRA.

A local model sees one row at a time: batch norm stays in evaluation mode whatever ``train()`` is called with,
because a batch statistic would tie every embedding to the other records of its batch. Pre-training on public
data is the one exception and says so (``pretraining``).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from accel.errors import InvalidArgument
from accel.validate import require
from vfl.local.config import LocalModelConfig

__all__ = [
    "ConvNet",
    "LocalModel",
    "MultilayerPerceptron",
    "ResNet18",
    "SmallResNet",
    "build_local_model",
    "embed_rows",
]

Floats = npt.NDArray[np.float32]

# ImageNet's channel statistics: public constants of the pre-trained network.
_CHANNEL_MEAN, _CHANNEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class LocalModel(nn.Module, abc.ABC):
    """A module with ``forward_blocks``; batch norm in evaluation mode unless inside ``pretraining()``."""

    output_width: int
    block_widths: list[int]
    _pretraining = False

    @abc.abstractmethod
    def forward_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(embeddings (B, d_i), pooled block outputs, each (B, m_l))."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.forward_blocks(rows)[0]

    def train(self, mode: bool = True) -> LocalModel:
        super().train(mode)
        if not self._pretraining:
            for module in self.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.training = False
        return self

    @contextmanager
    def pretraining(self) -> Iterator[None]:
        """Batch statistics are learnt in here: for public data only."""
        self._pretraining = True
        self.train(True)
        try:
            yield
        finally:
            self._pretraining = False
            self.train(False)


class MultilayerPerceptron(LocalModel):
    """Two ReLU layers and a linear one; the blocks are the two hidden layers."""

    def __init__(self, input_width: int, output_width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(input_width, hidden), nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, output_width)
        self.output_width, self.block_widths = output_width, [hidden, hidden]

    def forward_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        one = torch.relu(self.first(rows.flatten(1)))
        two = torch.relu(self.second(one))
        return self.last(two), [one, two]


class ConvNet(LocalModel):
    """Two 3×3 convolutions with batch norm (frozen statistics), pooled to 2×2, then a linear layer."""

    def __init__(self, channels: int, output_width: int) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.last = nn.Linear(32 * 4, output_width)
        self.output_width, self.block_widths = output_width, [16, 32]

    def forward_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        one = self.one(rows)
        two = self.two(one)
        pooled = nn.functional.adaptive_avg_pool2d(two, 2).flatten(1)
        return self.last(pooled), [one.mean((2, 3)), two.mean((2, 3))]


class _ResidualBlock(nn.Module):
    """Two 3×3 convolutions with batch norm around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.main(x) + self.shortcut(x))


class SmallResNet(LocalModel):
    """A residual network that two cores can train on CIFAR: a 3×3 convolution of stride 2, three blocks of 32, 64 and
    128 channels, and a 1×1 convolution to the embedding, averaged over the image. 0.4 million weights at 512 outputs; a
    strip of 32×16 pixels takes about 7 million multiplications. Four blocks for LoRA, the last one the embedding
    itself."""

    _WIDTHS = (32, 64, 128)

    def __init__(self, channels: int, output_width: int) -> None:
        super().__init__()
        first, second, third = self._WIDTHS
        self.stem = nn.Sequential(nn.Conv2d(channels, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        self.stages = nn.ModuleList(
            [_ResidualBlock(first, first, 1), _ResidualBlock(first, second, 2), _ResidualBlock(second, third, 2)]
        )
        self.last = nn.Sequential(
            nn.Conv2d(third, output_width, 1, bias=False), nn.BatchNorm2d(output_width), nn.ReLU()
        )
        self.output_width, self.block_widths = output_width, [*self._WIDTHS, output_width]

    def forward_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, pooled = self.stem(rows), []
        for stage in (*self.stages, self.last):
            x = stage(x)
            pooled.append(x.mean((2, 3)))
        return pooled[-1], pooled


class ResNet18(LocalModel):
    """torchvision's ResNet-18; output 1000 (its last layer) or 512 (the pooled features). Eight blocks."""

    def __init__(self, output_width: int, stem: str, pretrained: bool) -> None:
        super().__init__()
        from vfl.data.vision import resnet18

        self.network = resnet18(pretrained)
        self.keep_last = output_width == 1000
        if not self.keep_last:
            self.network.fc = nn.Identity()
        if stem == "cifar":
            self.network.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            self.network.maxpool = nn.Identity()
        self.output_width = output_width
        self.block_widths = [64, 64, 128, 128, 256, 256, 512, 512]

    def forward_blocks(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        net: Any = self.network
        x = net.maxpool(net.relu(net.bn1(net.conv1(rows))))
        pooled = []
        for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
            for block in layer:
                x = block(x)
                pooled.append(x.mean((2, 3)))
        return net.fc(pooled[-1]), pooled


def build_local_model(config: LocalModelConfig, input_shape: tuple[int, ...]) -> LocalModel:
    """The model of ``config`` for rows of ``input_shape`` (columns,) or (height, width, channels),
    evaluation mode.
    """
    require(config.kind != "identity", "local_model", config.kind, "a torch model (identity needs none)")
    width = config.width
    assert width is not None
    # A private generator: building a model must not disturb anybody's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model: LocalModel
        if config.kind == "mlp":
            model = MultilayerPerceptron(int(np.prod(input_shape)), width, config.hidden)
        else:
            require(
                len(input_shape) == 3,
                "local_model",
                config.kind,
                "mlp or identity for tables",
                "rows are no images",
            )
            if config.kind == "cnn":
                model = ConvNet(input_shape[2], width)
            elif config.kind == "small_resnet":
                model = SmallResNet(input_shape[2], width)
            else:
                model = ResNet18(width, config.stem, config.weights == "imagenet")
    if config.weights not in (None, "imagenet"):
        _load_weights(model, str(config.weights))
    return model.eval()


def _load_weights(model: LocalModel, path: str) -> None:
    """Load a state dict; a ResNet file with torchvision's names, or what ``vfl.local.pretrain`` wrote."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(state, dict) and "model" in state and isinstance(state["model"], dict):
        state = state["model"]
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    target: nn.Module = model
    if isinstance(model, ResNet18) and "conv1.weight" in state:
        target = model.network
    if isinstance(model, ResNet18) and not model.keep_last:
        state = {k: v for k, v in state.items() if not k.split("network.")[-1].startswith("fc.")}
    try:
        target.load_state_dict(state)
    except RuntimeError as error:
        raise InvalidArgument(f"local_weights = {path!r}: does not fit the model ({error})") from error


def to_tensor(rows: np.ndarray, config: LocalModelConfig) -> torch.Tensor:
    """Rows as the model wants them: pixels 0..255 to 0..1, channels first, upscaled, ImageNet constants."""
    if rows.ndim == 2:
        return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
    tensor = torch.from_numpy(np.ascontiguousarray(rows.transpose(0, 3, 1, 2), dtype=np.float32))
    if rows.dtype == np.uint8:
        tensor = tensor / 255.0
    if config.kind == "resnet18":
        if tensor.shape[1] == 1:
            tensor = tensor.expand(-1, 3, -1, -1)
        mean = torch.tensor(_CHANNEL_MEAN)[:, None, None]
        tensor = (tensor - mean) / torch.tensor(_CHANNEL_STD)[:, None, None]
    if config.upscale > 1:
        tensor = nn.functional.interpolate(tensor, scale_factor=config.upscale, mode="bilinear", align_corners=False)
    return tensor


def embed_rows(
    model: LocalModel,
    config: LocalModelConfig,
    rows: np.ndarray,
    *,
    keep_blocks: bool = False,
    batch_rows: int = 32,
    advance: Callable[[int], object] = lambda n: None,
) -> tuple[Floats, list[Floats]]:
    """Embeddings and (if wanted) pooled block outputs of all rows, frozen; ``advance`` is told of
    progress. Small batches and channels last keep a network's activations in the processor's caches: twice as fast.
    """
    model.eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    embeddings = np.empty((len(rows), model.output_width), dtype=np.float32)
    blocks = [np.empty((len(rows), w), dtype=np.float32) for w in model.block_widths] if keep_blocks else []
    with torch.no_grad():
        for start in range(0, len(rows), batch_rows):
            here = slice(start, min(start + batch_rows, len(rows)))
            batch = to_tensor(rows[here], config)
            if batch.ndim == 4:
                batch = batch.contiguous(memory_format=torch.channels_last)
            output, pooled = model.forward_blocks(batch)
            embeddings[here] = output.numpy()
            for array, tensor in zip(blocks, pooled, strict=False):
                array[here] = tensor.numpy()
            advance(here.stop - here.start)
    return embeddings, blocks
