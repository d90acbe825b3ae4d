"""Several steps of G-BMF on refmpc and on MP-SPDZ, with the same rows and the same noise: the weights agree."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bench.mpspdz.runner import HOME_VARIABLE, MpSpdz
from bench.mpspdz.training import MOST_STEPS, noise_of_the_servers, require_small, train_with_mpspdz
from protocols.plan.run_plan import plan_run
from tests.protocols.conftest import small_federation
from tests.protocols.secure_runs import released, run_secure, small_training, weight_bound

needs_mpspdz = pytest.mark.skipif(not os.environ.get(HOME_VARIABLE), reason=f"{HOME_VARIABLE} is not set")


@pytest.mark.mpspdz
@needs_mpspdz
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["setting 1", "setting 2"])
def test_training_agrees(tmp_path, momentum):
    """Ours is within ``weight_bound``. Theirs, a step: the clip's 0.37 % of γ, 26 units of softmax times ‖[h 1]‖·√S,
    the rounding of rows, noise and update; the same growth over the steps."""
    federation = small_federation(64, (5, 4), 4)
    plan = plan_run("g_bmf", federation, small_training(batch_size=16, momentum=momentum, learning_rate=0.25))
    result = run_secure(plan, federation, tmp_path)
    noise = noise_of_the_servers(plan, tmp_path)
    theirs = train_with_mpspdz(MpSpdz(), plan, federation, noise)
    training, unit = plan.training, 2.0**-16
    reach = np.hypot(plan.scales.row_bound, 1.0)
    sample = 0.0037 * training.clip_norm + reach * np.sqrt(plan.classes) * 26 * unit + np.sqrt(plan.width) * unit
    step = training.learning_rate * (sample + 3 * unit) + 2 * unit
    growth = 1 + 2 * training.learning_rate * reach**2
    steps = plan.schedule.num_steps
    their_bound = step * sum(growth**k for k in range(steps))
    carried = (1 - momentum**steps) / (1 - momentum)  # of an error in v; weight_bound takes its limit 1/(1−β)
    bound = carried * (weight_bound(plan) * (1 - momentum) + their_bound)
    assert bound < 0.5 * np.abs(released(result)[0]).max()  # the bound says something
    assert np.abs(theirs.weights - released(result)[0]).max() <= bound
    wrong = train_with_mpspdz(MpSpdz(), plan, federation, noise + 8 * np.abs(noise).mean())
    assert np.abs(wrong.weights - released(result)[0]).max() > bound  # other noise is noticed


def test_large_runs_are_refused_before_anything_runs():
    federation = small_federation(96, (5, 4), 4)
    plan = plan_run("g_bmf", federation, small_training(batch_size=8, epochs=10))
    with pytest.raises(ValueError, match=f"steps = 120: must be at most {MOST_STEPS} with MP-SPDZ; use fewer epochs"):
        require_small(plan)
    plan = plan_run("g_bmf", federation, small_training(weight_decay=0.99))
    with pytest.raises(ValueError, match=r"weight_decay = 0\.99: must be 1 with MP-SPDZ"):
        require_small(plan)
