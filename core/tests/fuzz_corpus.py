"""Inputs that are tried on every run: each a kind of trouble that a reader of files or text has had or could have."""

from __future__ import annotations

import struct

MAGIC = b"LMCACHE\0"


def header(version: int = 1, kind: int = 0, encoded: int = 0, raw: int = 0, codec: bytes = b"identity") -> bytes:
    head = struct.pack("<8sHBBI48s16sQQQQ32s", MAGIC, version, kind, 1, 0, bytes(48), bytes(16), encoded, raw, 0, 0, codec)
    return head.ljust(4096, b"\0")


HEADERS: list[bytes] = [
    b"",
    MAGIC,
    MAGIC[::-1],
    b"\0" * 4096,
    b"\xff" * 4096,
    b"\xff" * 144,
    header(version=0),
    header(version=2),
    header(version=0xFFFF),
    header(kind=2),
    header(kind=255),
    header(raw=(1 << 64) - 1),
    header(encoded=(1 << 64) - 1),
    header(encoded=1 << 63, raw=1 << 63),
    header(codec=b"\xff" * 32),
    header(codec=b"\xc3"),
    header(codec=b"\xed\xa0\x80"),
    b"%PDF-1.7" * 512,
    b"\x7fELF" + bytes(4092),
]

FAMILY = b'{"family": {"salt_id": "%s", "family_id": "%s"}}'
GOOD_ID = b"00" * 16
MANIFESTS: list[bytes] = [
    b"",
    b"null",
    b"[]",
    b"{}",
    b"0",
    b'"family"',
    b"{",
    b"\xff\xfe{}",
    b'{"family": null}',
    b'{"family": []}',
    b'{"family": {"salt_id": 1, "family_id": 2}}',
    b'{"family": {"salt_id": null, "family_id": null}}',
    b"[" * 100_000,
    b'{"family":' * 20_000,
    b'{"family": {"salt_id": "", "family_id": "' + GOOD_ID + b'", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
    b'{"family": {"salt_id": "", "family_id": ' + b"9" * 100_000 + b"}}",
    FAMILY % (b"zz", GOOD_ID),
    FAMILY % (b"00", GOOD_ID),
    FAMILY % (b"00" * 17, GOOD_ID),
    FAMILY % (b"00" * 500_000, GOOD_ID),
    FAMILY % (b"", b""),
    FAMILY % (b"", b"00"),
    FAMILY % (b"\\ud800", GOOD_ID),
    "{\"family\": {\"salt_id\": \"\", \"family_id\": \"\uff10\uff10\"}}".encode(),
]

USAGE_MAGIC = b"LMCuse\x01\n"
USAGES: list[bytes] = [
    b"",
    b"\0" * 24,
    b"\xff" * 24,
    USAGE_MAGIC,
    USAGE_MAGIC + b"\0" * 15,
    USAGE_MAGIC + struct.pack("<qq", -1, -1),
    USAGE_MAGIC + struct.pack("<qq", (1 << 63) - 1, -1),
    USAGE_MAGIC + struct.pack("<qq", (1 << 63) - 1, (1 << 63) - 1),
    USAGE_MAGIC + struct.pack("<qq", 0, -2),
    USAGE_MAGIC + struct.pack("<qq", 0, -(1 << 63)),
    USAGE_MAGIC + struct.pack("<qq", 0, -1) + b"host-1.1.2.3.4",
    USAGE_MAGIC + struct.pack("<qq", 0, -1) + b"host-1.1.2.3.4\r",
    USAGE_MAGIC + struct.pack("<qq", 0, -1) + b"\n" * 1000,
    USAGE_MAGIC + struct.pack("<qq", 0, -1) + b"\xff\xfe\n",
    USAGE_MAGIC + struct.pack("<qq", 0, -1) + b"a" * 100_000,
]

TEMPS: list[str] = [
    "",
    ".",
    "..",
    "....",
    "a.1.2.3",
    "a.1.2.3.4.5",
    "a.1.2.3.4\n",
    "a.-1.2.3.4",
    "a.1.2.3.-4",
    "a.1.2.3.1e9",
    "../../etc.1.2.3.4",
    "a/b.1.2.3.4",
    "a.\u0661.2.3.4",
    "a.1.2.3." + "9" * 20,
    "a." + "9" * 11 + ".2.3.4",
    "a" * 101 + ".1.2.3.4",
]
