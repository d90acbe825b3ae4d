"""Data sets, splits, public scaling; everything by public rules."""

import gzip
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel.errors import InvalidArgument
from tests.not_none import not_none
from vfl.data.scaling import PublicScaling, RowBound, bound_rows, row_bound_from_public, split_row_bound
from vfl.data.sets import DATA_SETS, load_data, load_embeddings, split_columns, usable_rows


@given(st.integers(1, 9), st.integers(1, 30), st.integers(1, 9))
def test_strips_cover_the_image_in_order(rows, width, num_clients):
    images = np.random.default_rng(0).integers(0, 255, (rows, 4, width, 3), dtype=np.uint8)
    if num_clients > width:
        with pytest.raises(ValueError, match="num_clients"):
            split_columns(images, num_clients)
        return
    strips = split_columns(images, num_clients)
    np.testing.assert_array_equal(np.concatenate(strips, axis=2), images)
    widths = [s.shape[2] for s in strips]
    assert max(widths) - min(widths) <= 1


def test_digits_are_dealt_by_seed_alone():
    one, two, three = load_data("digits"), load_data("digits"), load_data("digits", seed=1)
    np.testing.assert_array_equal(one.train[0], two.train[0])
    assert not np.array_equal(one.train_labels, three.train_labels)
    assert one.num_clients == 2 and one.classes == 10 and one.value_range == (0.0, 16.0)
    assert one.train[0].shape[1:] == (8, 4, 1)
    assert one.num_samples + len(one.test_labels) == 1797
    assert max(a.max() for a in one.train) <= 16


def test_public_rows_are_disjoint_from_private_rows():
    data = load_data("breast_cancer", num_clients=3)
    assert data.public is not None and len(not_none(data.public_labels)) == 57
    assert [a.shape[1] for a in data.train] == [10, 10, 10]
    rows = [np.concatenate(p, axis=1) for p in (data.train, data.test, data.public)]
    everything = np.concatenate(rows)
    assert len(np.unique(everything, axis=0)) == len(everything) == 569


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mnist"}, "data = 'mnist'"),
        ({"name": "digits", "num_clients": 9}, "num_clients = 9"),
        ({"name": "digits", "test_fraction": 1.0}, "test_fraction"),
        ({"name": "digits", "public_fraction": 0.9}, "public_fraction"),
        ({"name": "cifar10"}, "data_root"),
        ({"name": "ocr_letters"}, "data_root"),
    ],
)
def test_bad_options_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_data(**arguments)


def test_usable_rows_drops_the_rest_by_a_public_rule():
    assert usable_rows(50_000, 128)[0] == 49_920
    assert "last 80 rows" in usable_rows(50_000, 128)[1]
    assert usable_rows(256, 128) == (256, "all 256 rows take part, 2 batches of 128")
    with pytest.raises(ValueError, match="batch_size = 300"):
        usable_rows(256, 300)


def test_packed_embeddings(tmp_path):
    random = np.random.default_rng(0)
    packed = random.integers(0, 255, (6, 8), dtype=np.uint8)
    np.savez(tmp_path / "e.npz", train=packed, test=packed[:2], scale=np.float32(0.5),
             y_train=np.arange(6) % 3, y_test=np.array([0, 2]))  # fmt: skip
    data = load_embeddings(tmp_path / "e.npz", widths=[3, 5])
    train: np.ndarray = np.concatenate(data.train, axis=1)
    np.testing.assert_allclose(train, (packed * 0.5) ** 2)
    assert [a.shape[1] for a in data.test] == [3, 5] and data.classes == 3
    np.savez(tmp_path / "bad.npz", train=packed)
    with pytest.raises(ValueError, match="'test'"):
        load_embeddings(tmp_path / "bad.npz")
    with pytest.raises(ValueError, match="embeddings"):
        load_embeddings(tmp_path / "none.npz")


def write_idx(path, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(path, "wb") as stream:
        stream.write(header + array.astype(np.uint8).tobytes())
    path.with_suffix("").write_bytes(header + array.astype(np.uint8).tobytes())


def test_emnist_letters_from_original_idx_files(tmp_path):
    pytest.importorskip("torch")
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(1)
    images = {"train": random.integers(0, 256, (52, 28, 28)), "test": random.integers(0, 256, (26, 28, 28))}
    for part, array in images.items():
        write_idx(raw / f"emnist-letters-{part}-images-idx3-ubyte.gz", array)
        write_idx(raw / f"emnist-letters-{part}-labels-idx1-ubyte.gz", 1 + np.arange(len(array)) % 26)
    data = load_data("emnist", num_clients=2, data_root=tmp_path, public_fraction=0.25)
    assert data.classes == 26 and data.train_labels.min() == 0 and data.test_labels.max() == 25
    assert len(data.train_labels) == 39 and len(not_none(data.public_labels)) == 13
    whole = np.concatenate(data.test, axis=2)
    np.testing.assert_array_equal(whole[..., 0], images["test"].transpose(0, 2, 1))


def test_cifar10_from_its_pickles(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from vfl.data.vision import import_torchvision

    cifar = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(cifar, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a, **k: True)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    random = np.random.default_rng(2)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        batch = {"data": random.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 9, 3, 5]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    np.savez(
        tmp_path / "cifar100_public.npz",
        x=random.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8),
        y=np.arange(7),
    )
    data = load_data("cifar10", num_clients=2, data_root=tmp_path)
    assert data.train[0].shape == (20, 32, 16, 3) and data.train[0].dtype == np.uint8
    assert data.public is not None and len(data.public[0]) == 7


def test_missing_torchvision_files_say_what_to_do(tmp_path):
    pytest.importorskip("torch")
    with pytest.raises(InvalidArgument, match=r"cifar-10-batches-py/.*missing there: data_batch_1, .*test_batch"):
        load_data("cifar10", data_root=tmp_path)


def test_ocr_letters(tmp_path):
    random = np.random.default_rng(3)
    bits = random.integers(0, 2, (40, 128), dtype=np.uint8)
    np.savez(tmp_path / "ocr_letters.npz", x=np.packbits(bits, axis=1), y=np.arange(40) % 26, fold=np.zeros(40))
    data = load_data("ocr_letters", num_clients=2, data_root=tmp_path)
    assert data.classes == 26 and data.train[0].shape[1:] == (16, 4, 1)
    assert "ocr_letters" in DATA_SETS


@given(st.integers(0, 2**31), st.sampled_from(["clip", "normalise"]), st.sampled_from([np.float32, np.float64]))
def test_rows_stay_within_the_bound(seed, rule, dtype):
    rows = (np.random.default_rng(seed).normal(size=(20, 9)) * 10.0 ** np.arange(-10, 10)[:, None]).astype(dtype)
    rows[3] = 0
    bound = bound_rows(rows, 1.5, rule)
    norms = np.linalg.norm(bound.astype(np.float64), axis=1)
    assert norms.max() <= 1.5
    if rule == "clip":
        short = np.linalg.norm(rows.astype(np.float64), axis=1) < 1.5 * (1 - 1e-6)
        np.testing.assert_array_equal(bound[short], rows[short])
    else:
        np.testing.assert_allclose(np.delete(norms, 3), 1.5, rtol=1e-6)


def test_client_bounds_compose_to_the_row_bound():
    bounds = split_row_bound(2.0, 3)
    assert len(bounds) == 3
    assert sum(b**2 for b in bounds) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="row_bound"):
        split_row_bound(0.0, 3)


def test_scaling_from_stated_range_and_from_public_rows():
    scaled = PublicScaling.from_range(0, 16).apply(np.array([[0.0, 8.0, 16.0, 99.0]]))
    np.testing.assert_allclose(scaled, [[0, 0.5, 1, 1]])
    public = np.array([[0.0, 5.0], [2.0, 5.0]])
    scaling = PublicScaling.from_public(public)
    np.testing.assert_allclose(scaling.apply(np.array([[2.0, 6.0], [100.0, 5.0]])), [[1, 1], [4, 0]])
    assert "2 public rows" in scaling.source
    assert np.abs(PublicScaling.from_public(public, method="range").apply(public)).max() == 1
    with pytest.raises(ValueError, match="public_rows"):
        PublicScaling.from_public(public[:1])
    assert row_bound_from_public(np.array([[3.0, 4.0]])) == 5.0
    with pytest.raises(ValueError, match="row bound"):
        RowBound(-1.0)


def test_numpy_paths_do_not_import_torch():
    code = (
        "import sys, vfl.data.sets, vfl.data.columns, vfl.data.scaling, vfl.local.client, vfl.twins, "
        "vfl.data.embeddings, vfl.attack;"
        "bad = [m for m in ('torch', 'torchvision', 'opacus', 'refmpc') if m in sys.modules]; print(bad);"
        "sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
