"""Packages that a command needs beside those that are always installed, looked for before it starts."""

import platform
import re
from collections.abc import Iterable
from importlib import metadata

from lazyformer_fairseq.errors import UserError

PACKAGE = __name__.partition(".")[0]


def missing_packages(extra: str) -> list[str]:
    """Those of an extra of this package that are not installed; none where it runs from a folder, uninstalled."""
    try:
        required = metadata.requires(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return []
    marked = re.compile(rf"""([\w.-]+).*\bextra == ["']{extra}["']""")
    return [match[1] for line in required if (match := marked.match(line)) and not _is_installed(match[1])]


def refuse_without_extra(extra: str, what: str) -> None:
    """Raises a UserError where `what`, the user's words, needs an extra that is not whole."""
    if missing := missing_packages(extra):
        raise UserError(
            f"{what} needs {', '.join(missing)}, not installed here: pip install '{PACKAGE}[{extra}]', "
            f"or in a checkout pip install '.[{extra}]'"
        )


def versions(packages: Iterable[str], optional: Iterable[str] = ()) -> dict[str, str]:
    """Of Python and of packages, for a report; of the optional ones where they are installed."""
    found = [*packages, *filter(_is_installed, optional)]
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in found}}


def _is_installed(package: str) -> bool:
    return next(iter(metadata.distributions(name=package)), None) is not None
