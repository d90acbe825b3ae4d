"""Compiled kernels are kept, whoever the user is."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

import accel

PROGRAM = """
import numpy as np, accel
from accel.compiled import ring
x = np.ones((2, 3), dtype=np.uint64)
accel.kernels.product_pair(x, x, None, np.empty(3, dtype=np.uint64))
print("compiled" if ring._product_pair.stats.cache_misses else "from the cache")
"""
# root may write everywhere, unless it gives that up
ORDINARY = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.getuid() == 0 else []


def _without_kernels(directory: Path) -> str:
    """A copy of the package that has nothing compiled beside its source, and its place for PYTHONPATH."""
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(accel.__file__).parent, directory / "package" / "accel", ignore=unwanted, symlinks=True)
    return str(directory / "package")


@pytest.mark.skipif(bool(ORDINARY) and shutil.which("setpriv") is None, reason="root needs setpriv to act as a user")
@pytest.mark.parametrize("open_to_others", [False, True])
def test_a_user_who_can_write_neither_beside_the_source_nor_at_home_compiles_once(tmp_path, open_to_others):
    package = Path(_without_kernels(tmp_path))
    (temporary := tmp_path / "temporary").mkdir()
    (home := tmp_path / "home").mkdir()
    kept = temporary / f"ppvfl-kernels-{os.getuid()}"
    if open_to_others:  # whoever made it so could put code there
        kept.mkdir()
        kept.chmod(0o777)
    closed = [home, *(directory for directory in package.rglob("*") if directory.is_dir())]
    for directory in closed:
        directory.chmod(0o555)

    def run():
        kept_environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
        done = subprocess.run(
            [*ORDINARY, sys.executable, "-c", PROGRAM],
            env={**kept_environment, "TMPDIR": str(temporary), "HOME": str(home), "PYTHONPATH": str(package)},
            cwd=package,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    try:
        assert run() == "compiled"
        assert run() == ("compiled" if open_to_others else "from the cache")
        assert bool(list(kept.iterdir())) != open_to_others
    finally:
        for directory in closed:
            directory.chmod(0o755)


def test_what_was_compiled_at_the_installation_is_used_where_nothing_can_be_written(tmp_path):
    """A container with a read-only root compiled for 45 s at every start, and ``ppvfl warm`` would have changed
    nothing."""
    (image := tmp_path / "image").mkdir()
    package = _without_kernels(tmp_path)
    if ORDINARY and shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv to act as a user")
    temporaries = [tmp_path / name for name in ("first start", "second start")]

    def run(temporary: Path) -> str:
        temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(image), "TMPDIR": str(temporary), "PYTHONPATH": package}
        done = subprocess.run(
            [*ORDINARY, sys.executable, "-c", PROGRAM],
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    assert run(tmp_path) == "compiled"  # as the image is built
    image.chmod(0o555)
    try:
        assert [run(temporary) for temporary in temporaries] == ["from the cache"] * 2
        (copy,) = temporaries[0].glob("ppvfl-kernels-*/ppvfl-kernels-*")
        assert copy.stat().st_mode & 0o777 == 0o700 and not list(copy.parent.glob(".part-*"))
    finally:
        image.chmod(0o755)


def test_a_change_in_any_file_compiles_everything_anew_and_removes_what_was_kept(tmp_path):
    """numba looks only at the file of a function, not at what it calls in others: old machine code would run without a
    word."""
    shutil.copytree(
        Path(accel.__file__).parent, tmp_path / "accel", ignore=shutil.ignore_patterns("__pycache__"), symlinks=True
    )

    def run():
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (kept,) = (tmp_path / "accel" / "compiled" / "__pycache__").glob("ppvfl-kernels-*")
        return done.stdout.strip(), kept.name

    first, again = run(), run()
    assert (first[0], again[0]) == ("compiled", "from the cache") and first[1] == again[1]
    with (tmp_path / "accel" / "compiled" / "tiles.py").open("a") as file:
        file.write("\n# changed\n")
    assert run()[0] == "compiled" and run() != again


OTHER_ORDER = """
import hashlib, json, re, sys
import numpy as np, accel
from accel.compiled import ring
from numba import njit
for _ in range(int(sys.argv[1])):
    njit(lambda: 1)()  # what this process has compiled before
x = np.ones((2, 8, 16), dtype=np.uint64).transpose(0, 2, 1)
accel.kernels.matmul_pair(x, np.ones((2, 8, 10), dtype=np.uint64), None, np.empty((16, 10), dtype=np.uint64))
((_, compiled),) = ring._pair_by_columns.overloads.items()
code = re.findall(r'^define [^@]*@"?([^"(]+)"?(.*?)^}', compiled.library.get_llvm_str(), re.MULTILINE | re.DOTALL)
print(json.dumps({name: hashlib.sha256(body.encode()).hexdigest() for name, body in code}))
"""


def _machine_code(package, cache, compiled_before):
    done = subprocess.run(
        [sys.executable, "-c", OTHER_ORDER, str(compiled_before)],
        cwd=package,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": package},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_machine_code_of_two_processes_has_no_name_in_common_unless_it_is_the_same(tmp_path):
    """A third process that loads what both have kept links by names: a tile of ten columns was once taken for one of
    five, and a training's gradients were garbage, without a word."""
    package = _without_kernels(tmp_path)
    one, other = (_machine_code(package, tmp_path / f"cache {shift}", shift) for shift in range(2))
    assert any("add_panel" in name for name in one) and len(one) > 3
    assert {name for name in one.keys() & other.keys() if one[name] != other[name]} == set()


def test_no_two_kernels_have_one_name():
    package = Path(accel.__file__).parent / "compiled"
    modules = [importlib.import_module(f"accel.compiled.{path.stem}") for path in package.glob("[a-z]*.py")]
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    names = [(kernel.py_func.__module__, kernel.py_func.__qualname__) for kernel in kernels]
    assert len(names) > 100 and sorted(names) == sorted(set(names))
