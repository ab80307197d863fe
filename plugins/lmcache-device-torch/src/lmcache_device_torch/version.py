"""The version of this package: part of what a measurement is good for."""

from typing import Final

VERSION: Final = "0.1.0"
