"""The public description of a local model. Kept apart from the models, so that reading it needs no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from accel.validate import require, require_choice, require_integer

__all__ = ["LOCAL_MODELS", "LocalModelConfig"]

LOCAL_MODELS = ("identity", "mlp", "cnn", "small_resnet", "resnet18")


@dataclass(frozen=True)
class LocalModelConfig:
    """Which local model, and where its weights come from: nowhere (seeded start), a public file, or ImageNet.

    ``weights`` is None, ``"imagenet"`` (torchvision's file, ResNet-18 only) or the path of a state dict
    trained on *public* data. ``upscale`` enlarges images before the model, ``stem="cifar"`` gives ResNet-18 a
    3×3 first convolution without pooling. ``output_width`` of ResNet-18 is 1000 (logits) or 512 (features).
    """

    kind: str = "identity"
    output_width: int | None = None
    hidden: int = 128
    weights: str | None = None
    stem: str = "imagenet"
    upscale: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        require_choice("local_model", self.kind, LOCAL_MODELS)
        require_choice("stem", self.stem, ("imagenet", "cifar"))
        require_integer("upscale", self.upscale, 1, 16)
        require_integer("hidden", self.hidden, 1)
        if self.output_width is not None:
            require_integer("output_width", self.output_width, 1)
            if self.kind == "resnet18":
                require(
                    self.output_width in (512, 1000),
                    "output_width",
                    self.output_width,
                    "512 or 1000 for resnet18",
                )
            require(self.kind != "identity", "output_width", self.output_width, "None for the identity model")
        if self.weights == "imagenet":
            require(
                self.kind == "resnet18",
                "weights",
                self.weights,
                "a file for local models other than resnet18",
            )
        elif self.weights is not None:
            require(self.kind != "identity", "weights", self.weights, "None for the identity model")
            require(Path(self.weights).exists(), "local_weights", self.weights, "an existing file")

    @property
    def width(self) -> int | None:
        """Output width; None for identity, which keeps the input's."""
        default = {"identity": None, "mlp": 60, "cnn": 60, "small_resnet": 512, "resnet18": 1000}[self.kind]
        return self.output_width if self.output_width is not None else default

    def fingerprint(self) -> str:
        """A hash of every choice and of the weight file's content: part of the embedding cache's key."""
        fields = asdict(self)
        if self.weights not in (None, "imagenet"):
            fields["weights"] = hashlib.sha256(Path(str(self.weights)).read_bytes()).hexdigest()
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def describe(self) -> str:
        if self.kind == "identity":
            return "identity (the scaled columns themselves)"
        source = {None: f"seeded start {self.seed}, not trained", "imagenet": "ImageNet weights"}.get(
            self.weights, f"public weights {Path(str(self.weights)).name}"
        )
        return f"{self.kind}, output {self.width}, {source}, frozen, batch norm in evaluation mode"
