"""Local models: the DP-leak rule for every one of them, the cache, pre-training, torchvision shim."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vfl.data.embeddings import embed
from vfl.data.sets import VerticalData, load_data
from vfl.federation import build_federation
from vfl.local.config import LocalModelConfig

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def tiny_images(seed=0, rows=6, size=16):
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (2, rows, size, size // 2, 3), dtype=np.uint8)
    labels = np.arange(rows) % 3
    train, test, public = tuple(images), tuple(images[:, :3]), tuple(images[:, 3:])
    return VerticalData("tiny", 3, train, labels, test, labels[:3], public, labels[3:], (0.0, 255.0))


def tiny_table(seed=0):
    random = np.random.default_rng(seed)
    rows = random.normal(size=(2, 12, 5)).astype(np.float32)
    labels = np.arange(12) % 3
    return VerticalData("table", 3, tuple(rows[:, :6]), labels[:6], tuple(rows[:, 6:9]), labels[6:9],
                        tuple(rows[:, 9:]), labels[9:])  # fmt: skip


MODELS = [
    ("table", LocalModelConfig("identity")),
    ("table", LocalModelConfig("mlp", output_width=7)),
    ("images", LocalModelConfig("identity")),
    ("images", LocalModelConfig("mlp", output_width=7)),
    ("images", LocalModelConfig("cnn", output_width=7, upscale=2)),
    ("images", LocalModelConfig("small_resnet", output_width=9)),
    ("images", LocalModelConfig("resnet18", output_width=512, stem="cifar")),
    ("images", LocalModelConfig("resnet18", output_width=1000, upscale=2)),
]


@pytest.mark.parametrize(("kind", "config"), MODELS, ids=lambda v: v if isinstance(v, str) else v.kind)
def test_one_private_row_changes_only_its_own_embedding(kind, config):
    """The rule that the per-record DP claim rests on: no statistic crosses private rows."""
    data = tiny_images() if kind == "images" else tiny_table()
    changed_rows = tuple(a.copy() for a in data.train)
    for array in changed_rows:
        array[2] = array[2][::-1].copy() if array.ndim > 2 else array[2] * -3 + 1
    changed = replace(data, train=changed_rows)
    before = build_federation(data, config, row_bound=2.0, row_rule="clip", lora=True)
    after = build_federation(changed, config, row_bound=2.0, row_rule="clip", lora=True)
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(before.rows()[others], after.rows()[others])
    assert np.abs(before.rows()[2] - after.rows()[2]).max() > 1e-6
    np.testing.assert_array_equal(before.test_rows(), after.test_rows())
    for one, two in zip(before.clients, after.clients, strict=True):
        for x, y in zip(one.block_outputs, two.block_outputs, strict=True):
            np.testing.assert_array_equal(x[others], y[others])
    assert np.linalg.norm(before.rows(), axis=1).max() <= 2.0


def test_lora_layers_read_the_chosen_blocks():
    """small_resnet has four blocks of 32, 64, 128 and 6 outputs; training and test rows of the chosen ones, in their
    order."""
    data, config = tiny_images(), LocalModelConfig("small_resnet", output_width=6)
    every = build_federation(data, config, lora=True)
    for choice, blocks in {"all": [0, 1, 2, 3], "first": [0], "last": [3], "3,1": [0, 2]}.items():
        chosen = build_federation(data, config, lora=True, lora_layers=choice)
        for client, tests, whole, all_tests in zip(
            chosen.clients, chosen.test_blocks, every.clients, every.test_blocks, strict=True
        ):
            assert client.lora is not None
            assert [l.down.shape[1] for l in client.lora.layers] == [(32, 64, 128, 6)[block] for block in blocks]
            for index, block in enumerate(blocks):
                np.testing.assert_array_equal(client.block_outputs[index], whole.block_outputs[block])
                np.testing.assert_array_equal(tests[index], all_tests[block])
        assert chosen.test_rows().shape == every.test_rows().shape
        assert any("LoRA reads" in note for note in chosen.notes) == (choice != "all")
    with pytest.raises(ValueError, match=r"lora_layers = '5': must be .* 1 to 4 .*; client 1 has 4 blocks"):
        build_federation(data, config, lora=True, lora_layers="5")


def test_batch_norm_stays_in_evaluation_mode():
    from vfl.local.models import build_local_model

    model = build_local_model(LocalModelConfig("cnn", output_width=4), (8, 8, 1))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    model.train()
    assert norms and not any(m.training for m in norms)
    with model.pretraining():
        assert all(m.training for m in norms)
    model.train()
    assert not any(m.training for m in norms)


def test_resnet_blocks_add_up_to_torchvision():
    from vfl.local.models import build_local_model, to_tensor

    config = LocalModelConfig("resnet18")
    model = build_local_model(config, (32, 16, 3))
    rows = to_tensor(np.random.default_rng(0).integers(0, 256, (2, 32, 16, 3), dtype=np.uint8), config)
    assert isinstance(model.network, torch.nn.Module)
    with torch.no_grad():
        output, blocks = model.forward_blocks(rows)
        torch.testing.assert_close(output, model.network(rows))
    assert [b.shape[1] for b in blocks] == model.block_widths == [64, 64, 128, 128, 256, 256, 512, 512]


def test_the_small_resnet_has_four_blocks_and_512_features():
    from vfl.local.models import build_local_model

    model = build_local_model(LocalModelConfig("small_resnet"), (32, 16, 3))
    with torch.no_grad():
        output, blocks = model.forward_blocks(torch.randn(2, 3, 32, 16))
    assert output.shape == (2, 512) and [b.shape[1] for b in blocks] == model.block_widths == [32, 64, 128, 512]
    assert sum(p.numel() for p in model.parameters()) < 400_000


def test_weight_files_fit_both_output_widths(tmp_path):
    from vfl.data.vision import resnet18
    from vfl.local.models import build_local_model

    path = tmp_path / "w.pth"
    torch.manual_seed(3)
    torch.save({k: v.half() if v.is_floating_point() else v for k, v in resnet18(False).state_dict().items()}, path)
    wide = build_local_model(LocalModelConfig("resnet18", weights=str(path)), (32, 16, 3))
    thin = build_local_model(LocalModelConfig("resnet18", output_width=512, weights=str(path)), (32, 16, 3))
    rows = torch.randn(1, 3, 32, 16)
    network: Any = wide.network
    with torch.no_grad():
        torch.testing.assert_close(network.fc(thin(rows)), wide(rows))
    with pytest.raises(ValueError, match="local_weights"):
        build_local_model(LocalModelConfig("cnn", weights=str(path)), (32, 16, 3))


def test_cache_is_used_and_noticed_when_anything_changes(tmp_path, monkeypatch):
    data, config = tiny_images(), LocalModelConfig("cnn", output_width=5)
    first = embed(data, config, cache_dir=tmp_path, keep_blocks=True)
    assert len(list(tmp_path.glob("embeddings-*.npz"))) == 2 and not first[0].from_cache

    import vfl.local.models

    calls = []
    original = vfl.local.models.embed_rows

    def counting(*arguments, **options):
        calls.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(vfl.local.models, "embed_rows", counting)
    again = embed(data, config, cache_dir=tmp_path, keep_blocks=True)
    assert not calls and again[0].from_cache
    np.testing.assert_array_equal(again[1].train, first[1].train)
    np.testing.assert_array_equal(again[1].train_blocks[1], first[1].train_blocks[1])
    for other_data, other_config, blocks in (
        (tiny_images(seed=1), config, True),
        (data, replace(config, seed=1), True),
        (data, replace(config, output_width=6), True),
        (data, config, False),
    ):
        calls.clear()
        embed(other_data, other_config, cache_dir=tmp_path, keep_blocks=blocks)
        assert calls


def test_public_scaling_is_required_for_tables():
    data = replace(tiny_table(), public=None, public_labels=None)
    with pytest.raises(ValueError, match="public rows"):
        build_federation(data, LocalModelConfig("identity"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "vgg"}, "local_model = 'vgg'"),
        ({"kind": "resnet18", "output_width": 100}, "output_width = 100"),
        ({"kind": "identity", "output_width": 10}, "output_width"),
        ({"kind": "cnn", "weights": "imagenet"}, "weights"),
        ({"kind": "cnn", "weights": "no/such/file"}, "local_weights = 'no/such/file'"),
        ({"kind": "cnn", "upscale": 0}, "upscale = 0"),
    ],
)
def test_bad_local_models_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LocalModelConfig(**arguments)


def test_images_are_asked_for():
    with pytest.raises(ValueError, match="no images"):
        embed(tiny_table(), LocalModelConfig("cnn"))


def test_row_bound_from_public_rows():
    federation = build_federation(load_data("breast_cancer"), row_bound="public", row_rule="clip")
    assert np.linalg.norm(federation.rows(), axis=1).max() <= federation.row_bound
    assert "public rows" in federation.public_inputs[0]
    with pytest.raises(ValueError, match="row_bound"):
        build_federation(load_data("digits"), row_bound="private")


def test_pretraining_learns_and_resumes_exactly(tmp_path):
    from vfl.local.pretrain import load_public_images, pretrain

    images, labels = load_public_images("digits", public_fraction=0.3)
    assert len(labels) == 539 and images.max() <= 1.0
    config = LocalModelConfig("cnn", output_width=16)
    options: dict[str, Any] = {"batch_size": 64, "learning_rate": 0.1, "progress": False}
    whole = pretrain(images, labels, config, tmp_path / "whole.pth", epochs=4, **options)
    half = tmp_path / "half.pth"

    class StopError(Exception):
        pass

    # Interrupt after the second epoch, then continue: the result must be the same bit for bit.
    import vfl.local.pretrain as module

    original, saves = module._save, []

    def stop_after_two(*arguments):
        original(*arguments)
        saves.append(1)
        if len(saves) == 2:
            raise StopError

    module._save = stop_after_two
    try:
        with pytest.raises(StopError):
            pretrain(images, labels, config, half, epochs=4, **options)
    finally:
        module._save = original
    again = pretrain(images, labels, config, half, epochs=4, resume=True, **options)
    assert again["history"] == whole["history"]
    one = torch.load(tmp_path / "whole.pth", weights_only=True)["model"]
    two = torch.load(half, weights_only=True)["model"]
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert whole["history"][-1]["validation_accuracy"] > 0.5
    # The file serves as local weights, and other options are refused.
    data = load_data("digits", public_fraction=0.3)
    trained = embed(data, replace(config, weights=str(half)))
    fresh = embed(data, config)
    assert np.abs(trained[0].train - fresh[0].train).max() > 1e-3
    with pytest.raises(ValueError, match="resume"):
        pretrain(images, labels, replace(config, seed=5), half, epochs=4, resume=True, **options)


def test_pretraining_stops_within_an_epoch_and_goes_on_exactly(tmp_path, monkeypatch):
    """A budget of time ends it after any batch; pieces together give what one piece gives."""
    import vfl.local.pretrain as module

    images, labels = module.load_public_images("digits", public_fraction=0.3)
    config = LocalModelConfig("small_resnet", output_width=8)
    options: dict[str, Any] = {"batch_size": 100, "epochs": 2, "shift": 1, "progress": False}
    whole = module.pretrain(images, labels, config, tmp_path / "whole.pth", **options)
    still = module.pretrain(images, labels, config, tmp_path / "still.pth", **{**options, "shift": 0})
    assert still["history"] != whole["history"]
    options["every_row"] = True
    whole, before = module.pretrain(images, labels, config, tmp_path / "whole.pth", **options), whole
    assert before["history"] != whole["history"]
    # the full rate is held: the epochs before it falls are those of a longer run
    held = [
        module.pretrain(images, labels, config, tmp_path / f"{n}.pth", **{**options, "epochs": n, "hold": 1})["history"]
        for n in (2, 3)
    ]
    assert held[0][0] == held[1][0] == whole["history"][0] and held[0][1] != whole["history"][1]
    assert held[0][1] == held[1][1] and len(held[1]) == 3
    file, pieces, ticks = tmp_path / "pieces.pth", 0, iter(range(10**6))
    monkeypatch.setattr("vfl.local.pretrain.time.monotonic", lambda: float(next(ticks)))
    found: dict[str, Any] = {"finished": False}
    while not found["finished"]:
        found = module.pretrain(images, labels, config, file, minutes=4 / 60, resume=True, **options)
        pieces += 1
    assert pieces > 2 and found["history"] == whole["history"] and whole["finished"]
    one, two = (torch.load(f, weights_only=True)["model"] for f in (tmp_path / "whole.pth", file))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_every_row_is_flipped_and_shifted_on_its_own():
    from vfl.local.pretrain import moved_batch, moved_rows

    x, shift = torch.arange(1.0, 1 + 40 * 2 * 5 * 3).reshape(40, 2, 5, 3), 2
    out = moved_rows(x, shift, torch.Generator().manual_seed(3))
    assert out.shape == x.shape
    padded = torch.nn.functional.pad(torch.stack([x, x.flip(3)]), [shift] * 4)
    drawn = []
    for row in range(len(x)):
        drawn += [
            (flip, top, left)
            for flip in range(2) for top in range(2 * shift + 1) for left in range(2 * shift + 1)
            if torch.equal(padded[flip, row, :, top : top + 5, left : left + 3], out[row])
        ]  # fmt: skip
    assert len(drawn) == len(x)
    for values, count in zip(zip(*drawn, strict=True), (2, 5, 5), strict=True):
        assert set(values) == set(range(count))
    # without shifts, rows or their mirror images; once a batch, all of them alike
    still = moved_rows(x, 0, torch.Generator().manual_seed(3))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(still, x, strict=True)]
    assert len(set(mirrored)) == 2 and torch.equal(still[~torch.tensor(mirrored)], x[~torch.tensor(mirrored)])
    together = moved_batch(x, 0, torch.Generator().manual_seed(3))
    assert torch.equal(together, x) or torch.equal(together, x.flip(3))


def test_public_images_are_read_from_sheets(tmp_path):
    """50 tiles a line, in the order of the labels, as from one file."""
    from PIL import Image

    from vfl.data.public_images import read_public_cifar100

    assert read_public_cifar100(tmp_path) is None
    images = np.random.default_rng(0).integers(0, 256, (100, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(100, dtype=np.uint8)
    folder = tmp_path / "cifar100_public"
    folder.mkdir()
    sheet = images.reshape(2, 50, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(64, 1600, 3)
    Image.fromarray(sheet).save(folder / "00.webp", lossless=True)
    labels.tofile(folder / "labels.u8")
    for _ in range(2):
        found = read_public_cifar100(tmp_path)
        assert found is not None
        np.testing.assert_array_equal(found[0], images)
        np.testing.assert_array_equal(found[1], labels)
        np.savez(tmp_path / "cifar100_public.npz", x=images, y=labels)


def test_pretraining_command(tmp_path, capsys):
    from vfl.local.pretrain import main

    out = tmp_path / "w.pth"
    assert main(["--epochs", "1", "--max-rows", "200", "--out", str(out), "--json", "--local-model", "mlp"]) == 0
    assert "validation_accuracy" in capsys.readouterr().out and out.exists()
