# SPDX-License-Identifier: Apache-2.0
"""Small random models of every family, as `transformers` saves them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 192
ODD_VOCABULARY = 190
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
        kind: `qwen3.5` (text alone), `qwen3.5-tied-whole` (with a vision encoder and multi-token prediction, tied),
            `qwen3-tied`, `qwen3` (with a vocabulary that has to be padded), `qwen3-moe`,
            `qwen3-moe-mixed` (one dense layer), `ministral3` or `nemotron`.
        folder: is made.
        dtype: of the weights.
    """
    import transformers

    if kind.startswith("qwen3.5"):
        return _make_qwen3_5(folder, dtype, whole=kind.endswith("-whole"), tied="-tied" in kind)
    classes = {"qwen3": "Qwen3", "ministral3": "Ministral3", "nemotron": "Ministral3"}
    name = "Qwen3Moe" if kind.startswith("qwen3-moe") else classes[kind.removesuffix("-tied")]
    settings: dict[str, object] = {"tie_word_embeddings": kind.endswith("-tied")}
    if kind.startswith("qwen3-moe"):
        settings |= _EXPERTS | {"norm_topk_prob": kind == "qwen3-moe"}
    if kind == "qwen3-moe-mixed":
        settings["mlp_only_layers"] = [0]
    if kind == "qwen3":
        settings["vocab_size"] = ODD_VOCABULARY
    if name == "Ministral3":
        settings["rope_parameters"] = dict(_YARN)
    config = getattr(transformers, f"{name}Config")(**(_SIZES | settings))
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


def _make_qwen3_5(folder: Path, dtype: torch.dtype, *, whole: bool, tied: bool) -> Path:
    """Save a Qwen3.5 of three gated delta nets and a full attention, with decays that last."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    pictures = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {**_SIZES, "num_hidden_layers": 4, "tie_word_embeddings": tied, "rope_parameters": rope | pictures}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16}
    text |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
    torch.manual_seed(7)
    model: torch.nn.Module
    if whole:
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-4.0, 0.0)
            elif parameter.dim() == 1:
                parameter.uniform_(-0.4, 0.4)
            else:  # so that gates are far from one half
                parameter.mul_(3)
    model.to(dtype).save_pretrained(folder)  # type: ignore[operator]
    if whole:
        file = folder / "model.safetensors"
        more = {"mtp.fc.weight": torch.zeros(64, 128, dtype=dtype), "mtp.norm.weight": torch.zeros(64, dtype=dtype)}
        save_file(load_file(file) | more, file, metadata={"format": "pt"})
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
