"""ppvfl init, key and pin: what is written, with which modes, and what is never overwritten."""

from __future__ import annotations

import ipaddress
import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from protocols.cli import main
from protocols.federation.read import configuration_hash, load
from protocols.net.credentials import load_credentials, read_certificate, role_of
from refmpc.net.certificates import fingerprint
from tests.protocols.run.hosts.federations import Authority, make_federation, rekey

PARTICIPANTS = ("server-0", "server-1", "server-2", "bank", "card")


def names_of(certificate: x509.Certificate | x509.CertificateSigningRequest) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_init_writes_everything_a_federation_needs(tmp_path: Path, capsys):
    folder = tmp_path / "fed"
    servers = "--servers=alpha.example:7000,10.0.0.2:7001,[fe80::2]:7002"
    options = [
        servers,
        "--clients=bank,card",
        "--widths=4,3",
        "--classes=no,yes",
        "--alignment=b.example:1,c.example:2",
    ]
    assert main(["init", "--dir", str(folder), "--json", *options]) == 0
    printed = json.loads(capsys.readouterr().out)
    config = load(folder / "federation.toml")
    assert printed["configuration_hash"] == configuration_hash(config)
    assert config.run.classes == ("no", "yes")
    for name in PARTICIPANTS:
        key, certificate = folder / name / "key.pem", folder / name / "certificate.pem"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
        assert printed["participants"][name] == fingerprint(certificate) == config.participant(name).fingerprint
        found = read_certificate(certificate)
        assert role_of(found) == config.participant(name).role
        assert 3640 < (found.not_valid_after_utc - found.not_valid_before_utc).days <= 3650
        load_credentials(config, name)
    assert names_of(read_certificate(folder / "server-0/certificate.pem")).get_values_for_type(x509.DNSName) == [
        "alpha.example"
    ]
    for name, address in (("server-1", "10.0.0.2"), ("server-2", "fe80::2")):
        addresses = names_of(read_certificate(folder / name / "certificate.pem")).get_values_for_type(x509.IPAddress)
        assert addresses == [ipaddress.ip_address(address)]
    assert "PRIVATE" not in (folder / "federation.toml").read_text()


def test_init_never_overwrites_by_accident(tmp_path: Path, capsys):
    make_federation(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for arguments in ([], ["--no-keys"], ["--csr"]):
        assert main(["init", "--dir", str(tmp_path), *arguments]) == 2
        assert "exists already: --force replaces it" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    (tmp_path / "federation.toml").unlink()
    assert main(["init", "--dir", str(tmp_path)]) == 2, "keys are not overwritten either"
    assert main(["init", "--dir", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "bank/key.pem").read_bytes() != before[tmp_path / "bank/key.pem"]
    load_credentials(load(tmp_path / "federation.toml"), "bank")


WRONG = [
    (["--servers=a:1,b:2"], "--servers = 'a:1,b:2': must be three addresses"),
    (["--servers=a:1,b:2,c"], "--servers = 'c': must be host:port"),
    (["--clients=Bank"], "name = 'Bank': must be a lower-case letter"),
    (["--alignment=a:1,b:2,c:3"], "--alignment = 'a:1,b:2,c:3': must be one address or 2"),
    (["--widths=4"], "--widths = '4': must be 2 numbers"),
    (["--widths=4,x"], "--widths = '4,x': must be positive numbers"),
    (["--classes=1"], "classes = 1: must be a number of classes from 2"),
    (["--target-range=1"], "--target-range '1' must be two numbers, LOW:HIGH"),
    (["--target-range=3:2"], "--target-range = 2"),
    (["--target-range=1:2", "--classes=2"], "--classes = '2': must be absent with --target-range"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG, ids=[a[0] for a, _ in WRONG])
def test_wrong_arguments_write_nothing(tmp_path: Path, capsys, arguments, sentence):
    assert main(["init", "--dir", str(tmp_path / "fed"), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "fed").exists()


def test_a_regression_is_asked_for_by_its_range(tmp_path: Path):
    assert main(["init", "--dir", str(tmp_path), "--no-keys", "--json", "--target-range=-4:6.5"]) == 0
    run = load(tmp_path / "federation.toml", pinned=False).run
    assert (run.training.task, run.target_range, run.classes) == ("regression", (-4.0, 6.5), ())


def test_each_host_makes_its_own_key(tmp_path: Path, capsys):
    """No key ever travels: the file comes without keys, certificates are sent and pinned."""
    make_federation(tmp_path, keys="none")
    path = tmp_path / "federation.toml"
    assert not (tmp_path / "bank").exists()
    for name in PARTICIPANTS:
        own = tmp_path / f"host of {name}"
        assert main(["key", "--as", name, "--config", str(path), "--credentials", str(own)]) == 0
        sent = str(own / "certificate.pem")
        assert main(["pin", "--participant", name, "--certificate", sent, "--config", str(path)]) == 0
    config = load(path)
    for name in PARTICIPANTS:
        load_credentials(config, name, tmp_path / f"host of {name}")
    again = ["key", "--as", "bank", "--config", str(path), "--credentials", str(tmp_path / "host of bank")]
    capsys.readouterr()
    assert main(again) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["key", "--as", "bonk", "--config", str(path)]) == 2
    assert "did you mean 'bank'?" in capsys.readouterr().err


def test_requests_signed_by_the_organisations_own_authority(tmp_path: Path):
    make_federation(tmp_path, keys="requests")
    authority = Authority()
    for name in PARTICIPANTS:
        request = x509.load_pem_x509_csr((tmp_path / name / "request.csr").read_bytes())
        assert request.is_signature_valid
        roles = names_of(request).get_values_for_type(x509.UniformResourceIdentifier)
        assert roles == [load(tmp_path / "federation.toml", pinned=False).participant(name).role]
        authority.sign_and_pin(tmp_path, name)
    config = load(tmp_path / "federation.toml")
    for name in PARTICIPANTS:
        load_credentials(config, name)


def test_pin_changes_two_values_and_keeps_every_comment(tmp_path: Path, capsys):
    make_federation(tmp_path)
    path = tmp_path / "federation.toml"
    path.write_text("# ours\n" + path.read_text().replace("width = 4", "width = 4 # since May"))
    path.chmod(0o640)
    before = path.read_text().splitlines()
    own = tmp_path / "new"
    assert main(["key", "--as", "bank", "--config", str(path), "--credentials", str(own)]) == 0
    pin = ["pin", "--participant", "bank", "--certificate", str(own / "certificate.pem"), "--config", str(path)]
    assert main(pin) == 0
    after = path.read_text().splitlines()
    new = fingerprint(own / "certificate.pem")
    assert new in capsys.readouterr().out
    differing = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert differing[0][1] == f'fingerprint = "{new}"'
    assert all(not a.startswith(("#", "[")) and "=" not in a.rstrip("=") for a, _ in differing[1:]), "certificate lines"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert main(pin) == 0, "pinning twice changes nothing"
    assert path.read_text().splitlines() == after


@pytest.mark.parametrize("style", ["fingerprint = ''", "", '  fingerprint="" # none yet'])
def test_pin_writes_into_any_layout(tmp_path: Path, style):
    make_federation(tmp_path, keys="none")
    path = tmp_path / "federation.toml"
    path.write_text(path.read_text().replace('fingerprint = ""', style))
    for name in ("server-2", "card"):
        own = tmp_path / name
        main(["key", "--as", name, "--config", str(path)])
        certificate = own / "certificate.pem"
        assert main(["pin", "--participant", name, "--certificate", str(certificate), "--config", str(path)]) == 0
        assert load(path, pinned=False).participant(name).fingerprint == fingerprint(certificate)
    assert "# none yet" in path.read_text() or "#" not in style


@pytest.mark.parametrize("style", ["{}", "  {} # the bank's"])
def test_pin_keeps_the_earlier_certificate_until_a_time(tmp_path: Path, capsys, style):
    earlier = make_federation(tmp_path).participant("bank").fingerprint
    path = tmp_path / "federation.toml"
    path.write_text(path.read_text().replace(f'fingerprint = "{earlier}"', style.format(f'fingerprint = "{earlier}"')))
    main(["key", "--as", "bank", "--config", str(path), "--credentials", str(tmp_path / "new")])
    new = tmp_path / "new/certificate.pem"
    pin = ["pin", "--participant", "bank", "--certificate", str(new), "--config", str(path)]
    for wrong in ("2020-01-01", "soon"):
        assert main([*pin, "--until", wrong]) == 2
        assert "--until" in capsys.readouterr().err
    assert main([*pin, "--until", "2130-01-31T12:00"]) == 0
    assert "accepted, too, until 2130-01-31 12:00 UTC" in capsys.readouterr().out
    entry = load(path).participant("bank")
    assert entry.pins == (fingerprint(new), earlier) and f"{entry.earlier_until}" == "2130-01-31 12:00:00+00:00"
    for credentials in (None, new.parent):  # the owner may use either
        load_credentials(load(path), "bank", credentials)
    assert main([*pin, "--until", "2130-01-31T12:00"]) == 2, "pinned already"
    assert "another than the one that is pinned" in capsys.readouterr().err
    assert main(pin) == 0  # the end, before its time
    assert (
        load(path).participant("bank").pins == (fingerprint(new),)
        and "earlier_" not in path.read_text().split("[[client]]")[1]
    )
    load_credentials(load(path), "bank", new.parent)


def test_pin_refuses_what_it_cannot_edit_safely(tmp_path: Path, capsys):
    config = make_federation(tmp_path)
    path = tmp_path / "federation.toml"
    text = path.read_text().replace('name = "bank"', 'name = "\\u0062ank"')
    path.write_text(text)
    assert load(path).participant("bank") == config.participant("bank")
    main(["key", "--as", "bank", "--config", str(path), "--credentials", str(tmp_path / "new")])
    arguments = ["--certificate", str(tmp_path / "new/certificate.pem"), "--config", str(path)]
    assert main(["pin", "--participant", "bank", *arguments]) == 2
    assert "cannot be edited safely" in capsys.readouterr().err
    assert path.read_text() == text


def test_pin_refuses_another_role(tmp_path: Path, capsys):
    make_federation(tmp_path)
    path = tmp_path / "federation.toml"
    before = path.read_text()
    stolen = ["--certificate", str(tmp_path / "bank/certificate.pem"), "--config", str(path)]
    assert main(["pin", "--participant", "server-0", *stolen]) == 2
    assert "says urn:ppvfl:client:bank, but must hold the URI urn:ppvfl:server:0" in capsys.readouterr().err
    assert path.read_text() == before


NAMES, USAGE = x509.SubjectAlternativeName, x509.ExtendedKeyUsage
WEB = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
NO_SIGNATURES = x509.KeyUsage(False, False, True, False, False, False, False, False, False)
UNFIT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the role was dropped": ((NAMES,), {}, "says no role, or several"),
    "a web server's": ((USAGE,), {"usage": WEB}, "must hold server and client authentication"),
    "no signatures": ((), {"usage": NO_SIGNATURES}, "its key usage must hold digital signature"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_pin_refuses_what_an_authority_made_unfit(tmp_path: Path, capsys, how):
    left_out, more, sentence = UNFIT[how]
    make_federation(tmp_path, keys="requests")
    request = x509.load_pem_x509_csr((tmp_path / "bank/request.csr").read_bytes())
    signed = Authority().sign(request, *left_out, **more)
    (tmp_path / "bank/certificate.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    arguments = ["--certificate", str(tmp_path / "bank/certificate.pem"), "--config", str(tmp_path / "federation.toml")]
    assert main(["pin", "--participant", "bank", *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert load(tmp_path / "federation.toml", pinned=False).participant("bank").fingerprint == ""


def test_a_new_key_waits_until_its_certificate_is_there(tmp_path: Path, capsys):
    """``key --csr --force`` replaced the key at once: the server could not start until the authority had signed."""
    config, path = make_federation(tmp_path), tmp_path / "federation.toml"
    words = ["key", "--as", "server-0", "--config", str(path)]
    assert main([*words, "--csr", "--force"]) == 0
    load_credentials(config, "server-0")  # the pair in use is whole
    request = x509.load_pem_x509_csr((tmp_path / "server-0/request.csr").read_bytes())
    signed, other = tmp_path / "signed.pem", tmp_path / "other.pem"
    signed.write_bytes(Authority().sign(request).public_bytes(serialization.Encoding.PEM))
    other.write_bytes((tmp_path / "server-1/certificate.pem").read_bytes())
    assert main([*words, "--install", str(other)]) == 2  # somebody else's
    load_credentials(config, "server-0")
    assert main([*words, "--install", str(signed)]) == 0
    assert main(["pin", "--participant", "server-0", "--certificate", str(signed), "--config", str(path)]) == 0
    load_credentials(load(path), "server-0")
    assert (tmp_path / "server-0/earlier/key.pem").stat().st_mode & 0o077 == 0
    capsys.readouterr()


def test_an_own_certificate_that_expired_is_told_at_the_start(tmp_path: Path):
    make_federation(tmp_path)
    config = rekey(tmp_path, "server-0", days=10, age=20)
    with socket.create_server(config.addresses[0]):  # so that the server ends at once
        main(["server", "--as", "server-0", "--config", config.source, "--log", str(tmp_path / "log")])
    assert "expired on" in (tmp_path / "log").read_text()
    config = rekey(tmp_path, "bank", days=10)
    (tmp_path / "bank.csv").write_text("id,x\n1,2\n")
    words = ["--columns", str(tmp_path / "bank.csv"), "--log", str(tmp_path / "log-bank")]
    assert main(["client", "--as", "bank", "--config", config.source, *words]) == 2
    assert "expires on" in (tmp_path / "log-bank").read_text()
