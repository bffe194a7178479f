# SPDX-License-Identifier: Apache-2.0
"""GPUs, links and published models: `tables.yaml`, and what a user adds to it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from megatron_csbp.reporting.attention_model import Rates
from megatron_csbp.tools.dry_run.network import Network

_SECTIONS = ("gpus", "links", "models")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link of one GPU to others.

    Attributes:
        gbytes: 10^9 bytes a second and direction.
        efficiency: part of it that collectives reach; assumed.
        latency_us: what starting a collective takes.
    """

    gbytes: float
    efficiency: float
    latency_us: float

    def seconds(self, num_bytes: float, starts: int = 1) -> float:
        """Return what it takes to receive so many bytes in so many collectives; nothing takes no time."""
        if not num_bytes:
            return 0.0
        return num_bytes / (self.gbytes * 1e9 * self.efficiency) + starts * self.latency_us * 1e-6


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU; see the head of `tables.yaml`."""

    memory_gib: float
    reserved_gib: float
    peak_tflops: float
    matmul_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    delta_net_tflops: float
    memory_tbytes: float
    launch_us: float
    node: int
    node_link: str
    network_link: str

    @property
    def attention_rates(self) -> Rates:
        """How fast it computes attention."""
        return Rates(
            forward=self.attention_forward_tflops * 1e12,
            backward=self.attention_backward_tflops * 1e12,
            memory=self.memory_tbytes * 1e12,
            launch_seconds=self.launch_us / 1e6,
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model, known by its sizes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    parameters: int

    def is_of(self, network: Network) -> bool:
        """Return whether a network has these sizes."""
        found = (len(network.layers), network.hidden, network.ffn, network.query_heads, network.key_heads)
        return found == (self.layers, self.hidden, self.ffn, self.heads, self.key_heads)


@dataclass(frozen=True)
class Tables:
    """What the planner takes for granted.

    Attributes:
        gpus: by name.
        links: by name.
        models: by published name.
    """

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    models: Mapping[str, Model]

    def gpu(self, name: str) -> Gpu:
        """Return a GPU.

        Raises:
            ValueError: there is none of that name.
        """
        if name not in self.gpus:
            raise ValueError(
                f"--gpu {name} is in no table; use {', '.join(self.gpus)}, or describe it in a file for --tables."
            )
        return self.gpus[name]

    def model_of(self, network: Network) -> tuple[str, Model] | None:
        """Return name and entry of the published model with the sizes of a network, if there is one."""
        return next((item for item in self.models.items() if item[1].is_of(network)), None)


def read_tables(added: Path | None = None) -> Tables:
    """Read the tables, and what a file adds to them.

    Args:
        added: value of `--tables`.

    Raises:
        ValueError: the file cannot be read or has an unknown or incomplete entry.
    """
    document = yaml.safe_load(resources.files(__package__).joinpath("tables.yaml").read_text(encoding="utf-8"))
    if added is not None:
        for section, entries in _read(added).items():
            for name, values in entries.items():
                document[section][name] = document[section].get(name, {}) | values
    tables = Tables(
        gpus={name: _entry(Gpu, "gpus", name, values) for name, values in document["gpus"].items()},
        links={name: _entry(Link, "links", name, values) for name, values in document["links"].items()},
        models={name: _entry(Model, "models", name, values) for name, values in document["models"].items()},
    )
    for name, gpu in tables.gpus.items():
        for link in (gpu.node_link, gpu.network_link):
            if link not in tables.links:
                raise ValueError(
                    f"--tables: gpu {name} names the link {link}, which is none of {', '.join(tables.links)}."
                )
    return tables


def _read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--tables {path}: {' '.join(str(error).split())}") from error
    is_right = isinstance(document, dict) and all(
        isinstance(entries, dict) and all(isinstance(values, dict) for values in entries.values())
        for entries in document.values()
    )
    unknown = [str(name) for name in document if name not in _SECTIONS] if is_right else []
    if not is_right or unknown:
        raise ValueError(
            f"--tables {path}: must hold {', '.join(_SECTIONS)}, each with named entries such as "
            f"`gpus: {{mine: {{memory_gib: 80, ...}}}}`{f'; {unknown[0]} is none of them' if unknown else ''}."
        )
    checked: dict[str, dict[str, dict[str, Any]]] = document
    return checked


def _entry[T](kind: type[T], section: str, name: str, values: Mapping[str, Any]) -> T:
    """Return one entry.

    Raises:
        ValueError: a value is missing, unknown or of another type.
    """
    wanted = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    wrong = sorted(values.keys() ^ wanted.keys())
    if wrong:
        raise ValueError(
            f"--tables: {section}: {name}: {wrong[0]} is {'unknown' if wrong[0] in values else 'missing'}; an entry "
            f"has {', '.join(wanted)}."
        )
    for key, value in values.items():
        is_text = wanted[key] in (str, "str")
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not (isinstance(value, str) if is_text else is_number):
            raise ValueError(
                f"--tables: {section}: {name}: {key}: {value!r} must be {'a name' if is_text else 'a number above 0'}."
            )
    return kind(**values)
