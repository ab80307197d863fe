"""An FTP server over a folder: `ftp_server.py PORT FOLDER`; the user kv has the password kv-secret-5."""

from __future__ import annotations

import logging
import sys

from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer

logging.basicConfig(level=logging.WARNING)


class Handler(FTPHandler):
    authorizer = DummyAuthorizer()


Handler.authorizer.add_user("kv", "kv-secret-5", sys.argv[2], perm="elradfmwMT")
FTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
