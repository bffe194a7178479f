# SPDX-License-Identifier: Apache-2.0
"""Every touch of a Megatron or Transformer Engine symbol that is not public API.

The table :data:`REQUIRED_SYMBOLS` names each such symbol; a contract test checks them one by one, so that a Megatron
which moved one is told by its name. To use another symbol, add a row and, beside it, a function that wraps it.

Nothing here imports Megatron until it is called: :func:`megatron_csbp.cpu_runtime.install` has to run first.
"""

import dataclasses
import importlib
import inspect
from pathlib import Path

MIN_VERSION = (0, 19)
BELOW_VERSION = (0, 20)


@dataclasses.dataclass(frozen=True)
class RequiredSymbol:
    """A Megatron symbol that this package relies on.

    Attributes:
        name: Dotted name: module, then attributes (``megatron.core.utils.get_pg_size``).
        parameters: Names of parameters that we pass by keyword or replace; the callable must accept each of them.
        used_for: What breaks without it.
    """

    name: str
    used_for: str
    parameters: tuple[str, ...] = ()

    def resolve(self) -> object:
        """Imports the module and returns the symbol.

        Raises:
            ImportError: If the module or the attribute does not exist; the message names it.
        """
        parts = self.name.split(".")
        for length in range(len(parts), 0, -1):
            module_name = ".".join(parts[:length])
            try:
                value: object = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                # Only "this is not a module" may fall through to its parent, not a missing dependency of it.
                if error.name is None or not module_name.startswith(error.name):
                    raise
                continue
            for attribute in parts[length:]:
                if not hasattr(value, attribute):
                    raise ImportError(f"{self.name} ({self.used_for}): {attribute!r} is not in this Megatron")
                value = getattr(value, attribute)
            return value
        raise ImportError(f"{self.name} ({self.used_for}): {parts[0]!r} cannot be imported")

    def check(self) -> None:
        """Checks that the symbol exists and accepts its parameters.

        Raises:
            ImportError: If it does not; the message names the symbol and the parameter.
        """
        value = self.resolve()
        if not self.parameters:
            return
        accepted = inspect.signature(value).parameters  # type: ignore[arg-type]
        missing = [name for name in self.parameters if name not in accepted]
        if missing:
            raise ImportError(f"{self.name} ({self.used_for}): no parameter {', '.join(missing)} in this Megatron")


REQUIRED_SYMBOLS: list[RequiredSymbol] = [
    RequiredSymbol("megatron.core.datasets.utils.compile_helpers", "dataset index builder from a wheel"),
    RequiredSymbol("megatron.core.datasets.helpers", "dataset index builder from a wheel"),
]


def megatron_version() -> str:
    """The version of the Megatron-Core that is imported, which need not be the one that pip knows."""
    version: str = importlib.import_module("megatron.core").__version__
    return version


def check_megatron_version(version: str | None = None) -> None:
    """Checks that Megatron-Core is one of the supported versions.

    Args:
        version: Version to check; the imported one by default.

    Raises:
        ImportError: If it is not; the message names the version, the supported range and what to install.
    """
    version = megatron_version() if version is None else version
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not MIN_VERSION <= numbers < BELOW_VERSION:
        lower, upper = (".".join(map(str, bound)) for bound in (MIN_VERSION, BELOW_VERSION))
        raise ImportError(
            f"megatron-core {version} is not supported: megatron_csbp needs >={lower},<{upper}; "
            f"pip install 'megatron-core>={lower},<{upper}' works"
        )


def ensure_dataset_helpers() -> None:
    """Keeps Megatron from compiling its dataset index builder where that is already compiled.

    Megatron runs ``make`` at every start. The wheel has the compiled module but no Makefile, so the run would end
    there, with CUDA or without. In a source checkout, which has the Makefile, Megatron compiles as usual.

    Raises:
        ImportError: If there is neither the compiled module nor a Makefile.
    """
    utils = importlib.import_module("megatron.core.datasets.utils")
    folder = Path(inspect.getfile(utils)).parent
    if (folder / "Makefile").exists():
        return
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise ImportError(
            f"Megatron's dataset index builder helpers_cpp is not compiled and {folder} has no Makefile: {error}; "
            "reinstall megatron-core from a wheel for this Python version, or use a source checkout"
        ) from error
    setattr(utils, "compile_helpers", _already_compiled)  # noqa: B010


def _already_compiled() -> None:
    """Stands in for Megatron's ``compile_helpers`` where the compiled module exists."""
