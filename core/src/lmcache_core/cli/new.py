"""`lmc new`: a complete package for a plugin, whose tests pass before a line of it has been changed."""

from __future__ import annotations

import keyword
import re
from importlib.resources import files
from pathlib import Path
from typing import Final

import click

from lmcache_core import __version__, plugins
from lmcache_core.config import MEMORY
from lmcache_core.errors import CacheError, ConfigError

KINDS: Final = {
    "backend": plugins.BACKENDS,
    "codec": plugins.CODECS,
    "device": plugins.DEVICES,
    "policy": plugins.POLICIES,
}
MAX_NAME: Final = 32
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_TAKEN: Final = re.compile(r"(core|new|(device|codec|policy|engine|fixture)(-.*)?)")
"""Names after which a backend's package would be taken for another."""
_TOKEN: Final = re.compile(r"\{\{([a-z]+)\}\}")
_FILES: Final = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "CHANGELOG.md": "CHANGELOG.md.tmpl",
    ".gitignore": "gitignore.tmpl",
    "src/{{package}}/__init__.py": "{{kind}}/plugin.py.tmpl",
    "tests/test_{{module}}.py": "{{kind}}/test.py.tmpl",
}


@click.command("new", help="Begin a plugin of your own: a complete package whose tests pass.")
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path(), help="Where to put it.  [default: .]")
def command(kind: str, name: str, folder: Path) -> None:
    """Writes DIR/lmcache-NAME, or DIR/lmcache-KIND-NAME for what is no backend; a folder that is there is an error."""
    package = write_package(kind, name, folder)
    click.echo(f"wrote {package}; next:")
    click.echo(f'  cd {package} && python3 -m venv .venv && .venv/bin/pip install -e ".[dev]" && .venv/bin/pytest')


def write_package(kind: str, name: str, folder: Path) -> Path:
    """The folder that was made; ConfigError for a name that no plugin may have, CacheError where a folder is there."""
    words = _words(kind, name)
    target = folder / words["dist"]
    contents = {
        _filled(path, words): _filled(_template(_filled(source, words)), words) for path, source in _FILES.items()
    }
    contents[f"src/{words['package']}/py.typed"] = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.mkdir()
        for path, text in contents.items():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            (target / path).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise CacheError(f"{error.filename}: is there already; nothing was written") from error
    except OSError as error:
        raise CacheError(f"{error.filename or target}: cannot be written: {error.strerror}") from error
    return target


def _words(kind: str, name: str) -> dict[str, str]:
    """What stands for the tokens of the templates."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ConfigError(
            f"{name[:80]!r} is no name for a plugin: write a to z, 0 to 9 and single -, from a letter on, "
            f"at most {MAX_NAME} characters"
        )
    ours = [offer.name for offer in plugins.discover(KINDS[kind]) if offer.dist == plugins.CORE]
    if name in ours or (kind == "backend" and name == MEMORY):
        raise ConfigError(f"the {kind} {name!r} comes with {plugins.CORE}, and a built-in's name stays the built-in's")
    if kind == "backend" and _TAKEN.fullmatch(name):
        raise ConfigError(f"a backend called {name!r} would be taken for another package of ours; choose another name")
    dist = f"lmcache-{name}" if kind == "backend" else f"lmcache-{kind}-{name}"
    module = name.replace("-", "_")
    stem = "".join(part.capitalize() for part in name.split("-"))
    core = ".".join(__version__.split(".")[:2])
    needed = [f'"lmcache-core>={core}"', *(['"numpy>=1.26"'] if kind == "device" else [])]
    words = {
        "kind": kind,
        "name": name,
        "dist": dist,
        "package": dist.replace("-", "_"),
        "module": f"{module}_" if keyword.iskeyword(module) else module,
        "stem": stem,
        "class": f"{stem}{kind.capitalize()}",
        "group": KINDS[kind],
        "core": core,
        "dependencies": ", ".join(needed),
        "conform": f"lmc conform {kind}:{name}" + (" -o path=/tmp/try" if kind == "backend" else ""),
    }
    return words | {"usage": _filled(_template(f"{kind}/usage.md"), words)}


def _template(path: str) -> str:
    return files("lmcache_core.cli").joinpath("templates", path).read_text(encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    return _TOKEN.sub(lambda token: words[token[1]], text)
