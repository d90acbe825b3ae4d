"""One deterministic hypothesis profile for the whole suite, and a cache of its own: what is kept from earlier runs
hides defects."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def empty_cache(tmp_path_factory):
    """Certificates are computed anew in every run of the suite, once for all its workers."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PPVFL_CACHE", str(shared / "ppvfl-cache"))
        yield
