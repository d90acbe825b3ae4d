"""Data sets, split vertically among clients: every client holds its own columns of the same people.

``digits`` and ``breast_cancer`` come with scikit-learn and need no download. ``cifar10``, ``cifar100`` and
``emnist`` (letters, 26 classes) are read through torchvision from ``data_root``; ``ocr_letters`` and files of
precomputed embeddings are .npz files. Users' own columns are read by ``vfl.data.columns``.

Train, test and *public* rows are chosen by a permutation that depends on the seed alone, never on a value.
Only public rows, or constants stated here, may be used to fit anything (see ``vfl.data.scaling``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from accel.validate import require, require_choice, require_integer, require_real
from vfl.data.public_images import read_public_cifar100

__all__ = [
    "DATA_SETS",
    "EMBEDDED_TABLES",
    "NUMBERS",
    "TWO_CLASSES",
    "VerticalData",
    "load_data",
    "load_embeddings",
    "split_columns",
    "usable_rows",
]

DATA_SETS = ("digits", "breast_cancer", "diabetes", "cifar10", "cifar100", "emnist", "ocr_letters")
# tables among them: training rows and columns, as ``load_data`` deals them by default
EMBEDDED_TABLES = {"breast_cancer": (398, 30), "diabetes": (310, 10)}
NUMBERS = ("diabetes",)  # their label is a number
TWO_CLASSES = ("breast_cancer",)

# where torchvision looks for these sets, under its root
_IMAGE_FILES = {
    "cifar10": ("cifar-10-batches-py", (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta")),
    "cifar100": ("cifar-100-python", ("train", "test", "meta")),
    "emnist": (
        "EMNIST/raw",
        tuple(
            f"emnist-letters-{part}-{what}-ubyte"
            for part in ("train", "test")
            for what in ("images-idx3", "labels-idx1")
        ),
    ),
}

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class VerticalData:
    """One data set as the clients hold it; entry i of a tuple belongs to client i, the last one has the
    labels.

    ``train``, ``test`` and ``public`` hold, per client, an array whose first axis is the (aligned) row:
    ``(rows, columns)`` for tables and embeddings, ``(rows, height, width, channels)`` for images. ``public``
    rows are public and take no part in training. ``value_range`` is a constant known without
    looking at the data (pixels: 0..255), or None when scaling must come from the public rows.
    ``are_embeddings`` marks rows that are a local model's output already and are not scaled again. ``classes`` is 1
    where the label is a number (a regression): it is scaled to −1 … 1 by a public range.
    """

    name: str
    classes: int
    train: tuple[Array, ...]
    train_labels: npt.NDArray[np.int64]
    test: tuple[Array, ...]
    test_labels: npt.NDArray[np.int64]
    public: tuple[Array, ...] | None = None
    public_labels: npt.NDArray[np.int64] | None = None
    value_range: tuple[float, float] | None = None
    are_embeddings: bool = False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        require(len(self.train) >= 1, "train", len(self.train), "at least one client's columns")
        require(len(self.test) == len(self.train), "test", len(self.test), "as many clients as train")
        for part, columns, labels in (
            ("train", self.train, self.train_labels),
            ("test", self.test, self.test_labels),
        ):
            rows = {len(c) for c in columns} | {len(labels)}
            require(len(rows) == 1, part, sorted(rows), "arrays with one common number of rows")
            if self.classes == 1:
                within = len(labels) == 0 or float(np.abs(labels).max()) <= 1.0
                require(within, f"{part} labels", "beyond −1 … 1", "targets scaled to −1 … 1 by a public range")
                continue
            require(
                len(labels) == 0 or (labels.min() >= 0 and labels.max() < self.classes),
                f"{part} labels",
                f"{labels.min()}..{labels.max()}" if len(labels) else "",
                f"from 0 to {self.classes - 1}",
                "renumber the classes from 0, or raise `classes`",
            )

    @property
    def num_clients(self) -> int:
        return len(self.train)

    @property
    def num_samples(self) -> int:
        return len(self.train_labels)

    def first_rows(self, count: int | None) -> VerticalData:
        """The first ``count`` training rows and a fifth as many test rows; everything for None."""
        if count is None:
            return self
        require_integer("max_rows", count, 1)
        tests = max(1, count // 5)
        return replace(
            self,
            train=tuple(a[:count] for a in self.train),
            train_labels=self.train_labels[:count],
            test=tuple(a[:tests] for a in self.test),
            test_labels=self.test_labels[:tests],
        )


def usable_rows(num_samples: int, batch_size: int) -> tuple[int, str]:
    """How many rows take part, and a sentence on the rest: the last M mod B rows of the aligned order are
    dropped.

    The rule is public and looks at no value, so it costs no privacy.
    """
    require_integer("num_samples", num_samples, 1)
    require_integer("batch_size", batch_size, 1, num_samples, way_out="choose a batch no larger than the aligned rows")
    dropped = num_samples % batch_size
    used = num_samples - dropped
    if not dropped:
        return used, f"all {used} rows take part, {used // batch_size} batches of {batch_size}"
    return used, (
        f"{used} of {num_samples} rows take part, {used // batch_size} batches of {batch_size}; "
        f"the last {dropped} rows of the aligned order are dropped (public rule)"
    )


def split_columns(features: Array, num_clients: int) -> tuple[Array, ...]:
    """Cut a table or images into ``num_clients`` contiguous strips of columns.

    Strips are equal when the width is a multiple of ``num_clients``; otherwise the first ones are one column
    wider. Images are cut along their width (axis 2).
    """
    require(
        features.ndim in (2, 3, 4),
        "features",
        features.shape,
        "(rows, columns) or (rows, height, width[, c])",
    )
    axis = 1 if features.ndim == 2 else 2
    width = features.shape[axis]
    require_integer(
        "num_clients", num_clients, 1, width, way_out=f"the data has {width} columns, one per client at most"
    )
    return tuple(np.ascontiguousarray(part) for part in np.array_split(features, num_clients, axis=axis))


def load_data(
    name: str,
    *,
    num_clients: int = 2,
    data_root: str | Path | None = None,
    test_fraction: float = 0.2,
    public_fraction: float | None = None,
    seed: int = 0,
    download: bool = False,
) -> VerticalData:
    """The data set ``name`` (one of ``DATA_SETS``), cut into ``num_clients`` column strips.

    ``test_fraction`` and ``public_fraction`` (of all rows) apply to sets without a split of their own; the
    public fraction is 0 for digits, whose pixel range 0..16 is known, and 0.1 for breast_cancer and diabetes, whose
    column ranges have to be learnt from somewhere. For CIFAR-10, CIFAR-100 is the public set.
    """
    require_choice("data", name, DATA_SETS, way_out="or pass your own files to vfl.data.columns")
    require_integer("num_clients", num_clients, 1)
    require_real("test_fraction", test_fraction, 0.0, 1.0, open_low=True, open_high=True)
    if name in ("digits", "breast_cancer", "diabetes", "ocr_letters"):
        return _load_single_file(name, num_clients, data_root, test_fraction, public_fraction, seed)
    return _load_torchvision(name, num_clients, data_root, public_fraction, seed, download)


def _digits() -> np.ndarray:
    """The digits of scikit-learn, 64 pixels and the label a row: its file, because importing it takes longer than all
    else before a small run."""
    found = importlib.util.find_spec("sklearn")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    raw = load_digits()
    return np.column_stack([raw.data, raw.target])


def _load_single_file(
    name: str,
    num_clients: int,
    data_root: str | Path | None,
    test_fraction: float,
    public_fraction: float | None,
    seed: int,
) -> VerticalData:
    value_range: tuple[float, float] | None
    if name == "digits":
        table = _digits()
        features, labels = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.float32), table[:, -1]
        value_range = (0.0, 16.0)
    elif name == "breast_cancer":
        from sklearn.datasets import load_breast_cancer

        raw = load_breast_cancer()
        features, labels, value_range = raw.data.astype(np.float32), raw.target, None
    elif name == "diabetes":
        from sklearn.datasets import load_diabetes

        raw = load_diabetes(scaled=False)
        low, high = 25.0, 346.0  # of the target, as its description says
        features, labels, value_range = raw.data.astype(np.float32), 2 * (raw.target - low) / (high - low) - 1, None
    else:
        path = _file_in(data_root, "ocr_letters.npz", "the OCR letters (x packed bits, y, fold)")
        with np.load(path) as z:
            bits = np.unpackbits(z["x"], axis=1).reshape(-1, 16, 8, 1)
            features, labels, value_range = bits.astype(np.float32), z["y"], (0.0, 1.0)
    usual = 0.1 if name in ("breast_cancer", "diabetes") else 0.0
    fraction = usual if public_fraction is None else public_fraction
    require_real("public_fraction", fraction, 0.0, 1.0 - test_fraction, open_high=True)
    if name not in NUMBERS:
        labels = labels.astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    num_test, num_public = round(test_fraction * len(labels)), round(fraction * len(labels))
    test, public, train = np.split(order, [num_test, num_test + num_public])
    strips = split_columns(features, num_clients)
    return VerticalData(
        name=name,
        classes=1 if name in NUMBERS else int(labels.max()) + 1,
        train=tuple(s[train] for s in strips),
        train_labels=labels[train],
        test=tuple(s[test] for s in strips),
        test_labels=labels[test],
        public=tuple(s[public] for s in strips) if num_public else None,
        public_labels=labels[public] if num_public else None,
        value_range=value_range,
        notes=(f"rows dealt to train, public and test by a permutation from seed {seed}",),
    )


def _load_torchvision(
    name: str,
    num_clients: int,
    data_root: str | Path | None,
    public_fraction: float | None,
    seed: int,
    download: bool,
) -> VerticalData:
    require(data_root is not None, "data_root", None, "a folder", f"pass --data-root DIR with {_files_of(name)}")
    root = Path(str(data_root))
    if not download:
        _require_files(name, root)
    from vfl.data.vision import read_torchvision

    (x_train, y_train), (x_test, y_test) = read_torchvision(name, root, download)
    classes = {"cifar10": 10, "cifar100": 100, "emnist": 26}[name]
    notes: list[str] = []
    public = public_labels = None
    fraction = public_fraction or 0.0
    require_real("public_fraction", fraction, 0.0, 1.0, open_high=True)
    # The published order of these sets is already shuffled, but not for every class file (EMNIST): deal
    # again.
    order = np.random.default_rng(seed).permutation(len(y_train))
    num_public = round(fraction * len(order))
    public_rows, train_rows = order[:num_public], np.sort(order[num_public:])
    if name == "emnist":
        train_rows = order[num_public:]
    if num_public:
        public, public_labels = split_columns(x_train[public_rows], num_clients), y_train[public_rows]
        notes.append(f"{num_public} training rows set aside as public rows by a permutation from seed {seed}")
    elif name == "cifar10":
        found = read_public_cifar100(root)
        if found is not None:
            public, public_labels = split_columns(found[0], num_clients), found[1]
            notes.append("public rows: CIFAR-100")
    return VerticalData(
        name=name,
        classes=classes,
        train=split_columns(x_train[train_rows], num_clients),
        train_labels=y_train[train_rows],
        test=split_columns(x_test, num_clients),
        test_labels=y_test,
        public=public,
        public_labels=public_labels,
        value_range=(0.0, 255.0),
        notes=tuple(notes),
    )


def _files_of(name: str) -> str:
    folder, files = _IMAGE_FILES[name]
    return f"{folder}/ and in it {', '.join(files)}"


def _require_files(name: str, root: Path) -> None:
    """Name what is missing, before torch is loaded."""
    folder, files = _IMAGE_FILES[name]
    missing = [file for file in files if not (root / folder / file).exists()]
    allowed = (
        f"a folder with {folder}/ ({name} as its authors publish it, unpacked); missing there: {', '.join(missing)}"
    )
    require(not missing, "data_root", str(root), allowed)


def load_embeddings(path: str | Path, *, num_clients: int = 2, widths: Sequence[int] | None = None) -> VerticalData:
    """Precomputed embeddings: an .npz with ``train``, ``test``, ``y_train``, ``y_test`` [, ``public``,
    ``y_public``].

    Columns are dealt to the clients in equal contiguous blocks, or in blocks of ``widths``. Integer arrays
    with a ``scale`` are read as (value·scale)², the packing of square-rooted activations.
    """
    file = Path(path)
    require(file.exists(), "embeddings", str(path), "an existing .npz file")
    with np.load(file) as z:
        for key in ("train", "test", "y_train", "y_test"):
            require(key in z, f"{path}: keys", sorted(z), f"a file with {key!r}", "see vfl.data.sets.load_embeddings")
        scale = float(z["scale"]) if "scale" in z else None
        parts = {k: _unpack(z[k], scale) for k in ("train", "test", "public") if k in z}
        labels = {k: z[k].astype(np.int64) for k in ("y_train", "y_test", "y_public") if k in z}
    total = parts["train"].shape[1]
    deal: dict[str, tuple[Array, ...]] = {}
    for key, rows in parts.items():
        if widths is None:
            deal[key] = split_columns(rows, num_clients)
            continue
        require(sum(widths) == total, "widths", list(widths), f"block widths that sum to {total}")
        blocks = np.split(rows, np.cumsum(widths)[:-1], axis=1)
        deal[key] = tuple(np.ascontiguousarray(block) for block in blocks)
    return VerticalData(
        name=file.stem,
        classes=int(max(v.max() for v in labels.values())) + 1,
        train=deal["train"],
        train_labels=labels["y_train"],
        test=deal["test"],
        test_labels=labels["y_test"],
        public=deal.get("public"),
        public_labels=labels.get("y_public"),
        are_embeddings=True,
        notes=(f"precomputed embeddings from {file.name}",),
    )


def _unpack(values: Array, scale: float | None) -> npt.NDArray[np.float32]:
    if scale is None or not np.issubdtype(values.dtype, np.integer):
        return values.astype(np.float32)
    root = values.astype(np.float32) * np.float32(scale)
    return root * root


def _file_in(data_root: str | Path | None, name: str, what: str) -> Path:
    require(data_root is not None, "data_root", None, "a folder", f"pass --data-root DIR with {name}: {what}")
    path = Path(str(data_root)) / name
    require(path.exists(), "data_root", str(data_root), f"a folder with {name} ({what})")
    return path
