"""A stand-in for Google Cloud Storage, in memory: `gcs_server.py PORT`.

gcp-storage-emulator reads an upload with the parser for mail, which takes a carriage return at the end of an object
for a part of the line end that follows: one random object in 256 would come back a byte short.  So uploads are read
here.
"""

from __future__ import annotations

import json
import sys
from email.message import Message
from typing import Any

from gcp_storage_emulator import server

read_data = server._read_data


def read_upload(handler: Any, query: Any) -> Any:
    kind = Message()
    kind["Content-Type"] = handler.headers.get("Content-Type", "")
    if kind.get_content_type() != "multipart/related":
        return read_data(handler, query)
    mark = b"\n--" + str(kind.get_boundary()).encode()
    _, meta, content, _ = (b"\n" + server._read_raw_data(handler)).split(mark)
    head, _, body = content.partition(b"\n\n")
    return {
        "meta": json.loads(meta.partition(b"\n\n")[2]),
        "content": body,
        "content-type": head.partition(b":")[2].strip().decode(),
    }


server._read_data = read_upload
server.create_server("127.0.0.1", int(sys.argv[1]), in_memory=True).run()
