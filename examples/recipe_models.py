# SPDX-License-Identifier: Apache-2.0
"""The models and lengths of the recipes, and their topologies."""

from dataclasses import dataclass, replace
from pathlib import Path

from megatron_csbp.tools.dry_run.tables import read_tables
from megatron_csbp.transformer.delta_net.traffic import DeltaNetSizes

EXAMPLES = Path(__file__).parent
_TABLES = read_tables()
LENGTHS = {"32k": 32_768, "64k": 65_536, "128k": 131_072, "256k": 262_144}


@dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
        folder: of its recipes.
        size: name of the size, as the files begin.
        layers: number of layers.
        hidden: hidden size.
        ffn: width of the MLP.
        heads: query heads.
        tied: one tensor is embedding and output layer.
        theta: base of the rotary embedding.
        gpus: GPUs of the recipes; at least 8.
        name: the published name.
        lengths: of the recipes.
        groups: ranks of the context group, by length.
        block: diffusion block size.
        key_heads: key/value heads of an attention layer.
        head: head dim.
        tensor: tensor-parallel size.
        delta_net: sizes of its gated delta nets; three of four layers are some.
    """

    folder: str
    size: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    tied: bool = False
    theta: int = 1_000_000
    gpus: int = 8
    name: str = ""
    lengths: tuple[str, ...] = ("32k", "128k", "256k")
    groups: tuple[int, ...] = (2, 8, 8)
    block: int = 32
    key_heads: int = 8
    head: int = 128
    tensor: int = 1
    delta_net: DeltaNetSizes | None = None

    @property
    def parameters(self) -> int:
        """Parameters in all, as the planner's tables have them."""
        return _TABLES.models[self.name].parameters

    @property
    def is_qwen(self) -> bool:
        """Whether it is a Qwen to be converted, and not Nemotron-Labs-Diffusion."""
        return self.folder == QWEN


def _named(model: Model, name: str) -> Model:
    return replace(model, name=f"{name} {model.size.upper()}")


NEMOTRON, QWEN = "nemotron_diffusion", "qwen_ar_to_bdlm"
_HYBRID = Model(
    QWEN,
    "3.5_27b",
    64,
    5120,
    17_408,
    24,
    theta=10_000_000,
    gpus=16,
    name="Qwen3.5 27B",
    lengths=("64k", "128k", "256k"),
    groups=(2, 4, 4),
    block=256,
    key_heads=4,
    head=256,
    tensor=4,
    delta_net=DeltaNetSizes(key_heads=16, value_heads=48, key_dim=128, value_dim=128),
)
MODELS = (
    *(
        _named(model, "Nemotron-Labs-Diffusion")
        for model in (
            Model(NEMOTRON, "3b", 26, 3072, 9216, 32),
            Model(NEMOTRON, "8b", 34, 4096, 14_336, 32),
            Model(NEMOTRON, "14b", 40, 5120, 16_384, 32, theta=1_000_000_000, gpus=16),
        )
    ),
    *(
        _named(model, "Qwen3")
        for model in (
            Model(QWEN, "0.6b", 28, 1024, 3072, 16, tied=True),
            Model(QWEN, "1.7b", 28, 2048, 6144, 16, tied=True),
            Model(QWEN, "4b", 36, 2560, 9728, 32, tied=True),
            Model(QWEN, "8b", 36, 4096, 12_288, 32),
        )
    ),
    _HYBRID,
    replace(_HYBRID, size="3.8_27b", name="Qwen3.8 27B"),
)


@dataclass(frozen=True)
class Recipe:
    """A model at one length.

    Attributes:
        model: the model.
        length: name of the length, as the file ends.
    """

    model: Model
    length: str

    @property
    def tokens(self) -> int:
        """Clean tokens of a sequence, L."""
        return LENGTHS[self.length]

    @property
    def group(self) -> int:
        """Ranks of the context group, P."""
        return self.model.groups[self.model.lengths.index(self.length)]

    @property
    def copies(self) -> int:
        """Rows of a token: its clean one and one for each corrupted view."""
        return 3 if self.model.is_qwen else 2

    @property
    def path(self) -> Path:
        """The file."""
        return EXAMPLES / self.model.folder / f"{self.model.size}_{self.length}.yaml"

    @property
    def data_parallel(self) -> int:
        """Sequences that are trained at the same time."""
        return self.model.gpus // (self.group * self.model.tensor)

    @property
    def topology(self) -> str:
        """Ranks of each kind of parallelism, in words."""
        tensor = f"TP {self.model.tensor} x " if self.model.tensor > 1 else ""
        return f"{tensor}CSBP {self.group}"

    @property
    def sequences(self) -> int:
        """Sequences of a step: about 2 million tokens, 4 million at the longest."""
        return {"32k": 64, "64k": 32, "128k": 16, "256k": 16}[self.length]


RECIPES = tuple(Recipe(model, length) for model in MODELS for length in model.lengths)
