"""The sentences of the report that do not depend on a result."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ADAPTERS", "ATTACK", "BASELINES", "CHOICE", "NOISE", "SECURE", "own_weights"]

CHOICE = (
    "On public data only: ten superclasses of CIFAR-100 stand in for the private task, the projection is fitted "
    "on the other ten, and noise and batch are scaled so that a mean gradient is as noisy as in the real run. "
    "Each option was varied with the others fixed and the best mean over the budgets kept. No private row, of "
    "training or test, took part. `python -m bench.paper choose --data-root DIR` repeats it."
)

NOISE = (
    "Noise in one coordinate of the last iterate, over the largest signal the clip allows; 20 epochs, both "
    "presets. Ours counts what an outsider faces, 1.5σ²."
)

ADAPTERS = (
    "The paper finds between +0.1 and +2.7. With precomputed features LoRA reads one block, the penultimate layer, of "
    "which the embedding is an affine image; the global layer is linear in the embedding, so the adapters add no "
    "function that it cannot represent by itself. CIFAR-10 from its images gives LoRA all eight blocks, as in the "
    "paper; the column without noise takes the same clipped steps, and is what the adapters could give at these rates. "
    "With noise three things work against them. The clip runs over the global gradient and all layer gradients "
    "together, which leaves less of the bound to the global layer. U, which starts at zero, moves by η_i times a "
    "noised gradient. And an estimate of B·d_i per-sample gradients from the r·d_i noised sums of a layer has more "
    "unknowns than equations and an error far above the signal: the MMSE estimate of our settings lets next to "
    "nothing of it through, and what the paper's regularisation lets through is mostly noise."
)

ATTACK = (
    "The target trains on a random half of the rows; the other half are non-members, the test rows the attacker's "
    "population. Plain trains the global layer on frozen local models, without clipping or noise: a linear layer "
    "memorises little. In the paper Plain trains the local models too; the second line does that with an MLP at "
    "each client, on the frozen features."
)

BASELINES = (
    "Baselines run at example-level DP: all epochs and both clients together count for one person. The published "
    "codes clip a whole batch and count one client. Their learning rates are searched on the public stand-in, as our "
    "settings are. Labels, and the trained local models that the clients keep, are outside their claims. Their ε, and "
    "LDP-GL's, is that of a record's own released rows alone and is not proven for the run: clients train on raw "
    "rows, so "
    "a record also moves later releases of others, un-noised. Ada-VFed is "
    "rebuilt from its abstract. The local model is an MLP with 60 outputs on the frozen features."
)

SECURE = (
    "Three server processes and two clients over loopback, in our settings. The twin gets the servers' own noise, "
    "so that the two differ by fixed-point rounding; G-Shuff's secret order lies nowhere, so its twin draws order "
    "and noise of its own. Accuracies differ from Table 1's, whose noise comes from seeds."
)


def own_weights(digests: Sequence[str]) -> str:
    """The note below a table with lines of our own network; a digest that is none: the report these lines are from had
    none."""
    files = [
        f"of the file with SHA-256 {d[:16]}" if len(d) == 64 else "of a file whose digest was not kept" for d in digests
    ]
    return (
        f"Our own small network, lines {' and '.join(files)}: weights that `python -m vfl.local.pretrain` wrote; "
        "docs/paper-evaluation.md says more."
    )
