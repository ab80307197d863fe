"""A WebDAV server over a folder: `webdav_server.py PORT FOLDER`.

One thread, since its file provider answers 500 for a file that goes away while it is asked for.
"""

from __future__ import annotations

import sys

from cheroot.wsgi import Server
from wsgidav.wsgidav_app import WsgiDAVApp

app = WsgiDAVApp(
    {
        "provider_mapping": {"/": sys.argv[2]},
        "simple_dc": {"user_mapping": {"*": True}},
        "http_authenticator": {"domain_controller": None},
        "verbose": 0,
        "logging": {"enable": False},
    }
)
Server(("127.0.0.1", int(sys.argv[1])), app, numthreads=1).start()
