"""Accuracies printed in the paper, to stand next to ours."""

from __future__ import annotations

__all__ = ["PAPER_ACCURACY"]

# (data set, pre-training, method, setting) → {ε: test accuracy in %}.
# Table 1 of the paper: 20 epochs, B = 128, γ = 1.2, δ = 1e-5, η = 0.01; Pre-ImageNet and Pre-Cifar100.
PAPER_ACCURACY: dict[tuple[str, str, str, int], dict[float, float]] = {
    ("cifar10", "imagenet", "g_shuff", 1): {1: 69.38, 2: 71.78, 5: 73.27, 8: 73.69, 10: 73.76},
    ("cifar10", "imagenet", "g_bmf", 1): {1: 69.25, 2: 70.73, 5: 71.19, 8: 71.22, 10: 71.24},
    ("cifar10", "imagenet", "g_bmf", 2): {1: 51.74, 2: 58.69, 5: 67.29, 8: 70.27, 10: 71.59},
    ("cifar10", "imagenet", "gl_bmf", 1): {1: 69.63, 2: 71.09, 5: 71.48, 8: 71.53, 10: 71.56},
    ("cifar10", "imagenet", "gl_bmf", 2): {1: 54.41, 2: 60.45, 5: 68.19, 8: 71.01, 10: 72.34},
    ("cifar10", "cifar100", "g_shuff", 1): {1: 81.19, 2: 81.51, 5: 81.62, 8: 81.67, 10: 81.69},
    ("cifar10", "cifar100", "g_bmf", 1): {1: 77.22, 2: 77.28, 5: 77.31, 8: 77.34, 10: 77.37},
    ("cifar10", "cifar100", "g_bmf", 2): {1: 72.03, 2: 77.39, 5: 80.68, 8: 81.12, 10: 81.38},
    ("emnist", "imagenet", "g_shuff", 1): {1: 73.96, 2: 76.71, 5: 78.37, 8: 78.94, 10: 79.22},
    ("emnist", "imagenet", "g_bmf", 1): {1: 73.62, 2: 74.53, 5: 74.89, 8: 75.03, 10: 75.05},
    ("emnist", "imagenet", "g_bmf", 2): {1: 73.44, 2: 78.95, 5: 81.48, 8: 81.99, 10: 82.06},
    # Table 3 (γ = 2, an MLP as global model); the baselines' accounting there is not example-level.
    ("cifar10", "imagenet", "admm", 1): {1: 65.79, 4: 68.84, 8: 70.03},
    ("cifar10", "imagenet", "fedbcd", 1): {1: 68.22, 4: 70.43, 8: 71.68},
    ("cifar10", "imagenet", "split", 1): {1: 29.66, 4: 34.41, 8: 40.37},
    ("cifar10", "imagenet", "ada_vfed", 1): {1: 61.31, 4: 62.13, 8: 63.50},
}
