"""Checks, made before a command starts, for the optional packages that it needs."""

import platform
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

from lazyformer_fairseq.errors import UserError

PACKAGE = __name__.partition(".")[0]
FAIRSEQ = "fairseq-fixed==0.12.3.1"  # as in setup.py


def missing_packages(extra: str) -> list[str]:
    """Return an extra's packages that are not installed, or an empty list if this package itself is not installed."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    marked = re.compile(rf"""([\w.-]+).*\bextra == ["']{extra}["']""")
    missing = []
    for requirement in required:
        match = marked.match(requirement)
        if match and not _is_installed(match[1]):
            missing.append(match[1])
    return missing


def refuse_without_extra(extra: str, what: str) -> None:
    """Raise a UserError if any package in an extra is not installed.

    Args:
        extra: name of one of this package's extras.
        what: the command or feature that needs the extra, for the message.
    """
    if missing := missing_packages(extra):
        raise UserError(missing_packages_message(missing, extra, what))


def needs_transformers(what: str) -> None:
    """Raise a UserError if transformers, which `what` needs, is not installed."""
    needs_package("transformers", "huggingface", what)


def needs_package(package: str, extra: str, what: str) -> None:
    """Raise a UserError if a package from an extra, which `what` needs, is not installed."""
    if find_spec(package) is None:
        raise UserError(missing_packages_message([package], extra, what))


def missing_packages_message(missing: list[str], extra: str, what: str) -> str:
    """Return the message for missing packages, with the command that installs them."""
    return (
        f"{what} requires {', '.join(missing)} (not installed): pip install '{PACKAGE}[{extra}]', or in a checkout "
        f"pip install '.[{extra}]'"
    )


def needs_fairseq(what: str, without: str = "") -> None:
    """Raise a UserError if fairseq is not installed.

    Args:
        what: the command or feature that needs fairseq, for the message.
        without: an alternative that works without fairseq.
    """
    if not has_fairseq():
        message = missing_fairseq_message(what)
        if without:
            message += f"; without fairseq, use {without}"
        raise UserError(message)


def has_fairseq() -> bool:
    """Return whether fairseq is installed."""
    return find_spec("fairseq") is not None


def missing_fairseq_message(what: str) -> str:
    """Return an error message that says that `what` needs fairseq, and how to install it."""
    mend = f"run `make setup` or `pip install {FAIRSEQ}`"
    if sys.version_info >= (3, 13):
        mend = "fairseq runs on Python 3.11 and 3.12: run `make setup PYTHON=python3.12 VENV=.venv-3.12`"
    return f"{what} requires fairseq, which is not installed in Python {platform.python_version()}; {mend}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of every listed package that is installed, for a report."""
    found = filter(_is_installed, packages)
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in found}}


def _is_installed(package: str) -> bool:
    return next(iter(metadata.distributions(name=package)), None) is not None
