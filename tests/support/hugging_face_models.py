# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family, as `transformers` saves them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 190
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def make_model(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model into a new folder and return it.

    Args:
        kind: `qwen3-tied`, `qwen3`, `qwen3-moe`, `qwen3-moe-mixed` (one dense layer), `ministral3` or `nemotron`.
        folder: is made.
        dtype: of the weights.
    """
    import transformers

    classes = {"qwen3": "Qwen3", "ministral3": "Ministral3", "nemotron": "Ministral3"}
    name = "Qwen3Moe" if kind.startswith("qwen3-moe") else classes[kind.removesuffix("-tied")]
    settings: dict[str, object] = {"tie_word_embeddings": kind.endswith("-tied")}
    if kind.startswith("qwen3-moe"):
        settings |= _EXPERTS | {"norm_topk_prob": kind == "qwen3-moe"}
    if kind == "qwen3-moe-mixed":
        settings["mlp_only_layers"] = [0]
    if name == "Ministral3":
        settings["rope_parameters"] = dict(_YARN)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **settings)
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # norms of 1 would hide a norm that went to the wrong place
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    if kind == "nemotron":
        _rename_to_nemotron(folder)
    return folder


def _rename_to_nemotron(folder: Path) -> None:
    """Give a Ministral 3 model the names of Nemotron-Labs-Diffusion."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = {
        "diffusion_head.weight" if name == "lm_head.weight" else name.replace("model.", "encoder.", 1): tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "model_type": "nemotron_labs_diffusion",
        "architectures": ["NemotronLabsDiffusionModel"],
        "mask_token_id": 189,
        "block_size": 8,
    }
    path.write_text(json.dumps(config))
