"""federation.toml: what is read, what is refused in which words, and what the hash covers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from protocols.federation.read import (
    ConfigurationError,
    agreed_values,
    configuration_hash,
    load,
    other_pins,
    parse,
    pins_in_words,
    split_address,
)
from protocols.federation.template import federation_text
from protocols.settings import agreed_options, declared
from tests.not_none import not_none
from vfl.training import TrainingConfig

CLIENTS = [("bank", 4, "bank.example:7100"), ("card", 3, "[::1]:7100")]
TEXT = federation_text("pilot", [("a.example", 7000), ("10.0.0.2", 7000), ("fe80::1", 7000)], CLIENTS, 3)

JOINT = 'protocol = "gl_bmf"'  # beside other changes


def read(text: str):
    return parse(text, "f.toml", pinned=False)


def changed(old: str, new: str) -> str:
    assert old in TEXT
    text = TEXT.replace(old, new, 1)
    return text.replace('protocol = "g_bmf"', "# by default", 1) if JOINT in new else text


def test_the_template_says_the_defaults():
    config = read(TEXT)
    assert config.run.training == TrainingConfig(weights="open")
    assert config.addresses == {0: ("a.example", 7000), 1: ("10.0.0.2", 7000), 2: ("fe80::1", 7000)}
    assert [client.name for client in config.ordered_clients] == ["bank", "card"]
    assert config.label_client.name == config.predict.receiver == "card"
    assert config.run.classes == ("0", "1", "2")
    assert config.clients[1].alignment_address == ("::1", 7100)
    assert config.participant("server-2").role == "urn:ppvfl:server:2"
    assert config.participant("bank").role == "urn:ppvfl:client:bank"


def test_columns_of_the_label_client_come_last():
    first = TEXT.replace("label = false", "label = ?", 1).replace("label = true", "label = false")
    config = read(first.replace("label = ?", "label = true").replace('receiver = "card"', 'receiver = "bank"'))
    assert [client.name for client in config.ordered_clients] == ["card", "bank"]


def test_layers_are_trained_with_gl_bmf_only():
    assert read(TEXT).run.layers is None and not [key for key in agreed_values(read(TEXT)) if "rank" in key]
    config = read(changed("hidden = []", f'rank = 3\nlocal_update = "estimated"\n{JOINT}'))
    layers = not_none(config.run.layers)
    assert (layers.rank, layers.lora_alpha, layers.local_update) == (3, 8.0, "estimated")
    agreed = agreed_values(config)
    assert (agreed["[run] rank"], agreed["[run] lora_alpha"], agreed["[run] local_update"]) == (3, 8.0, "estimated")
    other = read(changed("hidden = []", f"rank = 3\nlocal_learning_rate = 0.1\n{JOINT}"))
    assert configuration_hash(other) != configuration_hash(config)


def test_class_names_may_be_given():
    assert read(changed("classes = 3", 'classes = ["no", "yes"]')).run.classes == ("no", "yes")


# what is written instead of what, and what the sentence must say
WRONG = [
    ("epsilon = 3.0", "epsilon = -1", r"f.toml: \[run\] epsilon = -1.0: must be a finite number in \(0, 100\]"),
    ("epsilon = 3.0", 'epsilon = "3"', r"\[run\] epsilon = '3': must be a number, without quotes"),
    ("epsilon = 3.0", "epsilon = true", r"\[run\] epsilon = True: must be a number"),
    ("epsilon = 3.0", "epsilon = inf", r"\[run\] epsilon = inf: must be a finite number"),
    ("epsilon = 3.0", "epsilom = 3.0", r"\[run\]: key = 'epsilom': must be one of .*did you mean 'epsilon'\?"),
    (
        "epsilon = 3.0",
        "epsilon = 1000",
        r"\[run\] epsilon = 1000.0: must be .* \(0, 100\]; lower epsilon: above 10 a claim protects next to",
    ),
    ("held_out = 0.0", "held_out = 0.7", r"\[run\] held_out = 0.7: must be a finite number in \[0, 0.5\]"),
    ('batch_size = "auto"', 'batch_size = "large"', r"\[run\] batch_size = 'large': must be an integer"),
    ("delta = 1e-5", "delta = 1.0", r"\[run\] delta = 1.0: must be a finite number in \(0, 1\)"),
    ('epochs = "auto"', "epochs = 4.5", r"\[run\] epochs = 4.5: must be an integer of at least 1"),
    ("hidden = []", "hidden = 64", r"\[run\] hidden = 64: must be a list of whole numbers"),
    ("hidden = []", "hidden = [0]", r"\[run\] hidden = 0: must be an integer of at least 1"),
    ("hidden = []", 'noise = "joint"', r"\[run\] noise = 'joint': must be one of 'distributed'"),
    ("hidden = []", "seed = 1", r"\[run\]: key = 'seed': must be one of"),
    (
        'protocol = "g_bmf"',
        'protocol = "g_bfm"',
        r"\[run\] protocol = 'g_bfm': must be one of .*did you mean 'g_bmf'\?",
    ),
    ("hidden = []", "rank = 4", r"\[run\] rank = 4: must be absent in g_bmf; only gl_bmf can have it"),
    (
        'protocol = "g_bmf"',
        'protocol = "g_shuff"\nlocal_update = "estimated"',
        r"\[run\] local_update = 'estimated': must be absent in g_shuff",
    ),
    (
        "hidden = []",
        f"hidden = [8]\n{JOINT}",
        r"\[run\] hidden = \(8,\): must be empty: GL-BMF trains one global layer",
    ),
    ("hidden = []", f'noise = "joint"\n{JOINT}', r"\[run\] noise = 'joint': must be one of 'distributed'"),
    (
        "# checkpoint_every = 100",
        f"checkpoint_every = 9\n{JOINT}",
        r"checkpoint_every = 9: must be 0: gl_bmf keeps every step",
    ),
    ("hidden = []", f"rank = 0\n{JOINT}", r"\[run\] rank = 0: must be an integer from 1"),
    ("hidden = []", f"lora_alpha = 0\n{JOINT}", r"\[run\] lora_alpha = 0.0: must be a finite number in \(0, inf\)"),
    (
        "hidden = []",
        f"local_learning_rate = -1\n{JOINT}",
        r"\[run\] local_learning_rate = -1.0: must be a finite number",
    ),
    (
        "hidden = []",
        f'local_update = "paper"\n{JOINT}',
        r"\[run\] local_update = 'paper': must be one of 'released', 'est",
    ),
    ("classes = 3", "classes = 1", r"\[run\] classes = 1: must be a number of classes from 2 to 1000"),
    ("classes = 3", 'classes = ["a", "a"]', r"\[run\] classes = \['a', 'a'\]: must be all different"),
    ("timeout = 60.0", "timeout = 0", r"\[run\] timeout = 0.0: must be a finite number in \[1, 86400\]"),
    ('row_bound = "auto"', "row_bound = 0", r"\[run\] row_bound = 0.0: must be a finite number"),
    ("port = 7000", "port = 70000", r"\[\[server\]\] 0: port = 70000: must be an integer from 1 to 65535"),
    ('host = "a.example"', 'host = "a.example:7000"', r"\[\[server\]\] 0: host = 'a.example:7000': .*without the port"),
    ('host = "10.0.0.2"', 'host = "A.example"', r"\[\[server\]\] 1: port = 7000: must be another host or port than"),
    ("id = 2", "id = 3", r"\[\[server\]\] 2: id = 3: must be an integer from 0 to 2"),
    ("id = 2", "id = 1", r"\[\[server\]\] id = \[0, 1, 1\]: must be 0, 1 and 2, in this order"),
    ("id = 0", "ide = 0", r"\[\[server\]\] 0: key = 'ide': must be one of .*did you mean 'id'\?"),
    ('name = "bank"', 'name = "card"', r"\[\[client\]\] name = \['card', 'card'\]: must be all different"),
    ('name = "bank"', 'name = "server-1"', r"\[\[client\]\] 0: name = 'server-1': must be a lower-case letter"),
    ('name = "bank"', 'name = "../bank"', r"\[\[client\]\] 0: name = '../bank': must be a lower-case letter"),
    ("label = false", "label = true", r"label = true = \['bank', 'card'\]: must be set for exactly one client"),
    ("label = true", "label = false", r"label = true = \[\]: must be set for exactly one client"),
    ("label = true", 'label = "yes"', r"\[\[client\]\] 1: label = 'yes': must be true or false"),
    ("width = 4", "width = 0", r"\[\[client\]\] 0: width = 0: must be an integer from 1"),
    (
        'alignment = "[::1]:7100"',
        'alignment = ""',
        r"alignment of card = '': must be host:port, where the label client",
    ),
    ('"bank.example:7100"', '"bank.example"', r"0: alignment = 'bank.example': must be host:port"),
    ('fingerprint = ""', 'fingerprint = "abc"', r"0: fingerprint = 'abc': must be 64 hexadecimal digits.*ppvfl pin"),
    ("version = 1", "version = 2", r"\[federation\] version = 2: must be an integer from 1 to 1"),
    ('receiver = "card"', 'receiver = "crad"', r"\[predict\] receiver = 'crad': .*did you mean 'card'\?"),
    ("[predict]", "[predicts]", r"the file: key = 'predicts': must be one of .*did you mean 'predict'\?"),
    ('epochs = "auto"', "epochs = fourty", r"f.toml is not valid TOML: .*line \d+.*text goes into quotes"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), WRONG, ids=[new for _, new, _ in WRONG])
def test_wrong_values_are_refused_by_name(old, new, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        read(changed(old, new))


def test_sections_of_servers_are_written_in_double_brackets():
    with pytest.raises(
        ConfigurationError, match=r"\[\[server\]\] = .*must be sections \[\[server\]\], in double brackets"
    ):
        read("[server]\nid = 0\n[federation]\nname = 'x'\nversion = 1\n")


def test_two_participants_with_one_key_are_refused():
    one = f'fingerprint = "{"ab" * 32}"'
    with pytest.raises(ConfigurationError, match=r"fingerprint of server-1 = 'abab.*another one than that of server-0"):
        read(TEXT.replace('fingerprint = ""', one, 2))


def test_a_run_needs_every_fingerprint(tmp_path: Path):
    file = tmp_path / "federation.toml"
    file.write_text(TEXT)
    assert load(file, pinned=False).source == str(file)
    with pytest.raises(
        ConfigurationError, match=r"no fingerprint for server-0, .*card, so others cannot recognise it; .*ppvfl pin"
    ):
        load(file)
    with pytest.raises(ConfigurationError, match=r"does not exist: give --config FILE, or write one with `ppvfl init`"):
        load(tmp_path / "other.toml")


def test_fingerprints_as_openssl_prints_them():
    shown = ":".join(["AB"] * 32)
    assert read(TEXT.replace('fingerprint = ""', f'fingerprint = "{shown}"', 1)).servers[0].fingerprint == "ab" * 32


SAME = [
    ('host = "a.example"', 'host = "internal.example"'),
    ("port = 7000", "port = 7777"),
    ("timeout = 60.0", "timeout = 5"),
    ('"bank.example:7100"', '"10.1.1.1:7200"'),
    ("epsilon = 3.0", "epsilon = 3 # the same number"),
    ("momentum = 0.0 ", ""),
]
OTHER = [
    ("epsilon = 3.0", "epsilon = 3.0000000001"),
    ('epochs = "auto"', "epochs = 41"),
    ("classes = 3", 'classes = ["0", "1", "x"]'),
    ("width = 4", "width = 5"),
    ('row_bound = "auto"', "row_bound = 2.0"),
    ('batch_size = "auto"', "batch_size = 128"),
    ("held_out = 0.0", "held_out = 0.1"),
    ('row_rule = "clip"', 'row_rule = "normalise"'),
    ('protocol = "g_bmf"', 'protocol = "g_shuff"'),
    ("hidden = []", "hidden = [8]"),
    ('protocol = "g_bmf"', JOINT),
    ('receiver = "card"', 'receiver = "bank"'),
    ("maximum_rows = 100000 ", "maximum_rows = 7 "),
    ("# maximum_rows = 100000000", "maximum_rows = 7"),
    ('name = "pilot"', 'name = "other"'),
    ('name = "bank"', 'name = "bonk"'),
    ("# checkpoint_every = 100", "checkpoint_every = 10"),
]


@pytest.mark.parametrize(("old", "new"), SAME, ids=[new for _, new in SAME])
def test_how_a_peer_is_reached_may_differ(old, new):
    assert configuration_hash(read(changed(old, new))) == configuration_hash(read(TEXT))


@pytest.mark.parametrize(("old", "new"), OTHER, ids=[new for _, new in OTHER])
def test_everything_else_changes_the_hash(old, new):
    one, other = read(TEXT), read(changed(old, new))
    assert configuration_hash(one) != configuration_hash(other)
    assert agreed_values(one) != agreed_values(other)


def with_pins(**pins: str) -> str:
    """Every participant's fingerprint differs; those of bank are ``pins``."""
    text = TEXT
    for number in range(5):
        name = ("server-0", "server-1", "server-2", "bank", "card")[number]
        given = pins if name == "bank" else {"fingerprint": f'"{number}{"f" * 63}"'}
        lines = "\n".join(f"{key} = {value}" for key, value in given.items())
        text = text.replace('fingerprint = ""', lines or "# none", 1)
    return text


A, B, C = (f'"{digit * 64}"' for digit in "abc")
UNTIL = {"earlier_until": "2030-01-31T13:00:00+01:00"}


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        ({"fingerprint": A}, {"fingerprint": A}, True),
        ({"fingerprint": A}, {"fingerprint": B}, False),
        ({"fingerprint": A}, {"fingerprint": B, "earlier_fingerprint": A, **UNTIL}, True),
        ({"fingerprint": B, "earlier_fingerprint": A, **UNTIL}, {"fingerprint": B}, True),
        ({"fingerprint": B, "earlier_fingerprint": A, **UNTIL}, {"fingerprint": C}, False),
    ],
)
def test_two_files_agree_if_they_have_one_certificate_of_everybody_in_common(one, other, agree):
    """A new certificate reaches one file after the other, and neither step splits the federation."""
    files = [parse(with_pins(**pins), "f.toml") for pins in (one, other)]
    assert configuration_hash(files[0]) == configuration_hash(files[1])
    for mine, theirs in (files, files[::-1]):
        assert other_pins(mine, pins_in_words(theirs)) == ([] if agree else ["bank"])
    assert other_pins(files[0], "") == [*files[0].pins]


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        ({"earlier_fingerprint": B}, r"earlier_until = .*a time with its zone"),
        (UNTIL, "earlier_until = .*beside earlier_fingerprint only"),
        ({"earlier_fingerprint": B, "earlier_until": '"2030-01-31"'}, "earlier_until = '2030-01-31'"),
        ({"earlier_fingerprint": B, "earlier_until": "2030-01-31T12:00:00"}, "a time with its zone"),
        ({"earlier_fingerprint": '"b"', **UNTIL}, "earlier_fingerprint = 'b': must be 64 hexadecimal digits"),
        ({"earlier_fingerprint": A, **UNTIL}, "earlier_fingerprint of bank = 'the same'"),
        ({"earlier_fingerprint": f'"4{"f" * 63}"', **UNTIL}, "fingerprint of card = .*than that of bank"),
    ],
)
def test_wrong_second_pins(pins, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        parse(with_pins(fingerprint=A, **pins), "f.toml")


def test_every_run_parameter_is_in_the_hash():
    """A parameter that is added to TrainingConfig later must not be left out by accident."""
    agreed = agreed_values(read(TEXT))
    left_out = {name for name in TrainingConfig.__dataclass_fields__ if f"[run] {name}" not in agreed}
    unless_changed = {each for each in declared("file", of=TrainingConfig) if each.agreed == "if changed"}
    assert left_out == {"seed", "dtype", "accountant", *(each.name for each in unless_changed)}
    for each in unless_changed:
        value = next((choice for choice in each.choices if choice != each.default), 2)
        run = read(TEXT).run
        changed_run = replace(run, training=replace(run.training, **{each.name: value}))
        assert agreed_options(changed_run)[each.name] == value and each.name not in agreed_options(run)


@pytest.mark.parametrize("text", ["host", "host:", ":7000", "host:0", "host:65536", "::1:7000", "a b:7000", "host:7e3"])
def test_wrong_addresses(text):
    with pytest.raises(ValueError, match=r"--servers = .*: must be host:port"):
        split_address(text, "--servers")
