"""`docs/authoring.md` does what it says: its files are written, its commands run, its output compared, line by line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "authoring.md"
BLOCK = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 300


@dataclass(frozen=True)
class Block:
    language: str
    words: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    for found in BLOCK.finditer(page):
        yield Block(found[1], found[2].strip(), found[3], page.count("\n", 0, found.start()) + 1)


class Shell:
    """Runs one line after the other, in a shell that keeps its folder and its variables between them."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.state, self.where, self.output = folder / "state", folder / "where", ""
        self.where.write_text(str(folder / "work"))
        (folder / "work").mkdir()
        hidden = ("PYTEST_", "COV_", "PYTHONPATH", "LMCACHE")
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environ |= environ
        self.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.environ['PATH']}"

    def run(self, line: str) -> int:
        script = f"cd '{self.folder}'; [ -e '{self.state}' ] && . '{self.state}'; {line}\n"
        script += f"status=$?; pwd >'{self.where}'; export -p >'{self.state}'; exit $status"
        ran = subprocess.run(
            ["bash", "-c", script], env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        self.output += ran.stdout
        return ran.returncode

    @property
    def folder(self) -> Path:
        return Path(self.where.read_text().strip())


def core_under_test(folder: Path) -> dict[str, str]:
    """Environment in which pip takes this core in place of the published one."""
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT / "core")]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    (wheel,) = wheels.glob("lmcache_core-*.whl")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"lmcache-core=={wheel.name.split('-')[1]}\n")
    return {"PIP_FIND_LINKS": str(wheels), "PIP_CONSTRAINT": str(constraints)}


def said(expected: str, output: str) -> str | None:
    """The first line of `expected` that `output` lacks; `...` stands for anything within a line, spaces for spaces."""
    for line in expected.splitlines():
        pattern = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in line.split("..."))
        if not re.search(pattern, output):
            return line
    return None


@pytest.mark.parametrize(
    ("expected", "missing"),
    [("a  b\n", None), ("a ... c", None), ("a b d", "a b d"), ("a b\nx", "x"), ("1 p... in ...", None)],
)
def test_a_line_that_was_not_said_is_seen(expected: str, missing: str | None) -> None:
    assert said(expected, "  a b c\n1 passed in 2 s") == missing


def test_the_page_does_what_it_says(tmp_path: Path) -> None:
    shell = Shell(tmp_path, **core_under_test(tmp_path))
    kinds = set()
    for block in blocks(PAGE.read_text()):
        where = f"docs/authoring.md:{block.line}"
        kinds.add(block.language)
        if block.words.startswith("file="):
            (shell.folder / block.words.removeprefix("file=")).write_text(block.text)
        elif block.language == "sh":
            shell.output = ""
            for line in block.text.splitlines():
                code = shell.run(line)
                assert (code != 0) == (block.words == "fails"), f"{where}: {line}: status {code}\n{shell.output}"
        elif block.language == "text":
            missing = said(block.text, shell.output)
            assert missing is None, f"{where}: not said: {missing}\n{shell.output}"
        else:
            pytest.fail(f"{where}: what is to be done with a block of {block.language} {block.words}?")
    assert kinds == {"sh", "text", "python", "yaml"}
