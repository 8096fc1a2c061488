# SPDX-License-Identifier: Apache-2.0
"""Certificates in users' secrets: accepted contents, refusals, and the PEM for HAProxy."""

import subprocess

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.x509.oid import NameOID
from dataplane.pki import Authority, key

from amphora_driver.errors import UnsupportedOption
from amphora_driver.model.secret_refs import Purpose, SecretMaterial, SecretName
from amphora_driver.secret import Secret
from amphora_driver.validation import certificates

OPTION = "listener option default_tls_container_ref"
PEM = serialization.Encoding.PEM
SHA256 = hashes.SHA256()
ROOT = Authority("root")
MIDDLE = Authority("middle", ROOT)
LOWER = Authority("lower", MIDDLE)
LEAF = LOWER.issue("www.example.com", number=1)


def secret(text):
    return Secret(text if isinstance(text, bytes) else text.encode())


def server(certificate=LEAF.certificate_pem, private=LEAF.key_pem, intermediates=(), passphrase=None):
    return SecretMaterial(
        option=OPTION,
        text=secret(certificate),
        private_key=secret(private) if private else None,
        passphrase=secret(passphrase) if passphrase else None,
        intermediates=tuple(secret(one) for one in intermediates),
    )


def taken(material, purpose=Purpose.CERTIFICATE):
    return certificates.build_pem(purpose, material).reveal().decode()


def refusal(material, purpose=Purpose.CERTIFICATE):
    with pytest.raises(UnsupportedOption) as caught:
        certificates.build_pem(purpose, material)
    said = str(caught.value)
    assert OPTION in said
    assert caught.value.__cause__ is None, "a parser error may quote the content"
    for part in (material.text, material.private_key):
        if part is not None:
            lines = [line for line in part.reveal().decode("utf-8", "replace").splitlines() if len(line) > 8]
            assert not [line for line in lines if line in said]
    return said


def subjects(text):
    found = x509.load_pem_x509_certificates(text.encode())
    return [one.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value for one in found]


def self_signed(private, algorithm=SHA256, *, authority=None):
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "self")])
    template = LEAF.certificate
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(7)
        .not_valid_before(template.not_valid_before_utc)
        .not_valid_after(template.not_valid_after_utc)
    )
    if authority is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    return builder.sign(private, algorithm).public_bytes(PEM).decode()


def written(private, how=serialization.PrivateFormat.PKCS8, encryption=None):
    return private.private_bytes(PEM, how, encryption or serialization.NoEncryption()).decode()


@pytest.mark.parametrize(
    "material",
    [
        server(LEAF.certificate_pem, LEAF.key_pem, [LOWER.pem, MIDDLE.pem]),
        server(LEAF.certificate_pem, LEAF.key_pem, [MIDDLE.pem, LOWER.pem]),
        server(LEAF.certificate_pem, LEAF.key_pem, [MIDDLE.pem + LOWER.pem]),
        server(MIDDLE.pem + LEAF.certificate_pem + LOWER.pem),
        server(LEAF.certificate_pem + LOWER.pem, LEAF.key_pem, [LOWER.pem, MIDDLE.pem]),
        server(f"\r\n{LEAF.certificate_pem}\n\n# words\n{LOWER.pem}{MIDDLE.pem}\n\n".replace("\n", "\r\n")),
        server(LEAF.key_pem + LEAF.certificate_pem + LOWER.pem + MIDDLE.pem, private=None),
    ],
    ids=["in order", "turned round", "in one text", "leaf inside", "twice", "with words", "key in the text"],
)
def test_certificate_chain_and_key_are_in_the_order_of_haproxy(material):
    text = taken(material)
    assert subjects(text) == ["www.example.com", "lower", "middle"]
    assert text.index("PRIVATE KEY") > text.rindex("BEGIN CERTIFICATE")
    assert text.count("PRIVATE KEY-----\n") == 2
    assert "\n\n" not in text
    assert "words" not in text


def keys():
    for curve in (ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()):
        yield curve.name, ec.generate_private_key(curve), hashes.SHA256()
    yield "rsa", key("RSA"), hashes.SHA256()
    yield "ed25519", ed25519.Ed25519PrivateKey.generate(), None
    yield "ed448", ed448.Ed448PrivateKey.generate(), None


@pytest.mark.root
@pytest.mark.parametrize(("private", "algorithm"), [one[1:] for one in keys()], ids=[one[0] for one in keys()])
def test_haproxy_loads_each_accepted_certificate(tmp_path, private, algorithm):
    (tmp_path / "one.pem").write_text(taken(server(self_signed(private, algorithm), written(private))))
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(
        "defaults\n mode http\n timeout connect 1s\n timeout client 1s\n timeout server 1s\n"
        f"frontend f\n bind 127.0.0.1:9 ssl crt {tmp_path}/one.pem\n"
    )
    subprocess.run(["haproxy", "-c", "-q", "-f", configuration], check=True)


@pytest.mark.parametrize("how", ["TraditionalOpenSSL", "PKCS8"])
@pytest.mark.parametrize("passphrase", [None, "geheim\n"])
def test_all_key_formats_are_accepted(how, passphrase):
    private = key("RSA")
    encryption = serialization.BestAvailableEncryption(b"geheim") if passphrase else None
    text = written(private, getattr(serialization.PrivateFormat, how), encryption)
    assert "ENCRYPTED" not in taken(server(self_signed(private), text, passphrase=passphrase))


def test_a_passphrase_for_an_unencrypted_key_is_accepted():
    assert "www.example.com" in subjects(taken(server(passphrase="for nothing")))


def test_an_expired_certificate_is_accepted():
    old = ROOT.issue("old.example.com", hours=-1)
    assert subjects(taken(server(old.certificate_pem, old.key_pem))) == ["old.example.com"]


def weak_rsa():
    return rsa.generate_private_key(65537, 1024)


def old_curve():
    return ec.generate_private_key(ec.SECP192R1())


def old_kind():
    return dsa.generate_private_key(2048)


@pytest.mark.parametrize(
    ("material", "word"),
    [
        (server(private=written(key("EC", 77))), "does not belong"),
        (server(private=None), "no private key"),
        (server(private="garbage"), "no private key"),
        (server(private=LEAF.key_pem.replace("M", "N", 3)), "private key"),
        (server(certificate="garbage"), "no certificate"),
        (server(certificate=LEAF.der), "no certificate"),
        (server(certificate="-----BEGIN CERTIFICATE-----\nTm90aGluZw==\n-----END CERTIFICATE-----\n"), "not valid"),
        (server(intermediates=["-----BEGIN CERTIFICATE-----\n\n-----END CERTIFICATE-----\n"]), "not valid"),
        (server(certificate=LOWER.pem), "does not belong"),
        (server(intermediates=[MIDDLE.pem * 4000]), "larger"),
        (
            server(private=written(key("RSA"), encryption=serialization.BestAvailableEncryption(b"a"))),
            "another passphrase",
        ),
        *((server(self_signed(one), written(one)), word) for one, word in (
            (weak_rsa(), "1024 bits"),
            (old_curve(), "secp192r1"),
            (old_kind(), "neither an RSA"),
        )),
        (server(intermediates=[self_signed(weak_rsa())]), "too short"),
    ],
)  # fmt: skip
def test_an_unusable_certificate_is_refused_by_name(material, word):
    assert word in refusal(material)


def test_several_cas_are_accepted():
    other = Authority("other")
    text = taken(SecretMaterial(option=OPTION, text=secret(f"words\n{ROOT.pem}\n{other.pem}{MIDDLE.pem}")), Purpose.CA)
    assert subjects(text) == ["root", "other", "middle"]
    assert "words" not in text


def test_a_self_signed_certificate_is_accepted_as_ca():
    pinned = self_signed(key("EC"), authority=False)
    assert subjects(taken(SecretMaterial(option=OPTION, text=secret(pinned)), Purpose.CA)) == ["self"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (LEAF.certificate_pem, "does not belong to a certificate authority"),
        (LEAF.key_pem, "no certificate"),
        (ROOT.certificate.public_bytes(serialization.Encoding.DER), "no certificate"),
    ],
)
def test_other_certificates_are_refused_as_ca(text, word):
    assert word in refusal(SecretMaterial(option=OPTION, text=secret(text)), Purpose.CA)


def crl_names():
    return SecretName("li", Purpose.CA, "ca"), SecretName("li", Purpose.CRL, "crl")


def test_a_crl_must_be_of_an_accepted_ca():
    authority, revoked = crl_names()
    other = Authority("other")
    given = {
        authority: SecretMaterial(option="ca", text=secret(other.pem + ROOT.pem)),
        revoked: SecretMaterial(option=OPTION, text=secret(ROOT.revoke(LEAF) + other.revoke())),
    }
    text = certificates.prepare_secrets(given)[revoked].reveal().decode()
    assert text.count("BEGIN X509 CRL") == 2
    stranger = Authority("other")
    given[revoked] = SecretMaterial(option=OPTION, text=secret(stranger.revoke(LEAF)))
    with pytest.raises(UnsupportedOption, match="none of the given certificate authorities") as caught:
        certificates.prepare_secrets(given)
    assert OPTION in str(caught.value)


def test_invalid_crls_are_refused():
    for text in (ROOT.pem, "garbage", x509.load_pem_x509_crl(ROOT.revoke().encode()).public_bytes(
        serialization.Encoding.DER
    )):  # fmt: skip
        assert "no certificate revocation list" in refusal(
            SecretMaterial(option=OPTION, text=secret(text)), Purpose.CRL
        )


def test_errors_contain_no_part_of_a_secret():
    material = server()
    assert "PRIVATE" not in repr(material)
    assert "***" in repr(material)
    assert repr(certificates.build_pem(Purpose.CERTIFICATE, material)) == "***"


class Counted:
    """The search for PEM boundaries, with a count of the bytes it reads."""

    def __init__(self, real):
        self._real = real
        self.octets = 0

    def finditer(self, text):
        self.octets += len(text)
        return self._real.finditer(text)


def test_a_megabyte_of_begin_lines_is_read_once(monkeypatch):
    """A search from each BEGIN line to the end of the text would take minutes."""
    counted = Counted(certificates._BOUNDARY)
    monkeypatch.setattr(certificates, "_BOUNDARY", counted)
    text = b"-----BEGIN CERTIFICATE-----\n" * 36_000
    assert 1_000_000 < len(text) < 1 << 20
    assert "no certificate" in refusal(SecretMaterial(option=OPTION, text=Secret(text)), Purpose.CA)
    assert counted.octets <= 2 * len(text)


def test_a_pem_block_ends_at_its_own_boundary():
    inner = LEAF.certificate_pem.encode() if isinstance(LEAF.certificate_pem, str) else LEAF.certificate_pem
    texts = (
        b"-----BEGIN CERTIFICATE-----\nnever ended\n" + inner,
        b"-----END CERTIFICATE-----\n" + inner,
        b"-----BEGIN X509 CRL-----\n" + inner + b"-----END X509 CRL-----\n",
        inner + b"-----BEGIN CERTIFICATE-----\nnever ended\n",
    )
    for text in texts:
        (found,) = certificates._blocks(Secret(text), b"CERTIFICATE")
        assert x509.load_pem_x509_certificate(found).subject == x509.load_pem_x509_certificate(inner).subject
