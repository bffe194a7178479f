# SPDX-License-Identifier: Apache-2.0
"""A gated delta net as the product's builder makes it, in fp64, against the recurrence and against Transformers.

Shapes: as in `delta_oracle`; H hidden size.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_csbp.transformer.delta_net.delta_rule import DeltaHeads
from tests.support.delta_oracle import DeltaCase, recurrence


def run(request: dict[str, Any]) -> None:
    """Be one rank: compute a layer and its gradients, add up the ranks', and note how far they are from the oracle."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.initialize import initialize_megatron

    from megatron_csbp import cpu_runtime, megatron_compat, training_setup
    from megatron_csbp.transformer.delta_net.layer import BlockDiffusionGatedDeltaNet

    sys.argv = ["probe", *request["arguments"]]
    args = training_setup.parse_and_validate_args(cpu_runtime.install("cpu"))
    megatron_compat.ensure_dataset_helpers()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = training_setup.model_config_from_args(args)
    model = config.get_builder_cls()(config).build_model(groups)
    layer = next(module for module in model.modules() if isinstance(module, BlockDiffusionGatedDeltaNet)).double()
    with torch.no_grad():  # the same on every rank, and no parameter at a value where a mistake would not show
        generator = torch.Generator().manual_seed(5)
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    case = DeltaCase(
        group_size=groups.cp.size(),
        block_size=args.diffusion_block_size,
        blocks_per_chunk=args.clean_seq_length
        // args.diffusion_block_size
        // (2 * groups.cp.size() if groups.cp.size() > 1 else 1),
        scheme=layer.rows().sharding.scheme,
    )
    shape = (2, case.length, 1, args.hidden_size)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float64)
    grad_out = torch.randn(shape, generator=generator, dtype=torch.float64)
    found = _on_ranks(layer, case, hidden, grad_out, groups.cp)
    if groups.cp.rank() == 0:
        facts = {"errors": _errors(found, _oracle(layer, case, hidden, grad_out))}
        if request["transformers"]:
            facts["transformers"] = _difference_from_transformers(layer, case, hidden, found["out"])
        torch.save(facts, Path(request["folder"]) / "facts.pt")


def _on_ranks(layer: Any, case: DeltaCase, hidden: Tensor, grad_out: Tensor, group: Any) -> dict[str, Tensor]:
    """Return the output and all gradients, with the ranks' shares added."""
    held = layer.rows()
    whole = torch.from_numpy(held.sample_positions + case.length * held.is_corrupted)
    counted = torch.from_numpy(held.is_counted)[:, None, None]
    rows = hidden.flatten(0, 1)[whole].requires_grad_()
    out, _ = layer(rows)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grads = torch.autograd.grad(out, [rows, *parameters], grad_out.flatten(0, 1)[whole] * counted)
    shares = {
        "out": torch.zeros_like(hidden).flatten(0, 1).index_add_(0, whole, out.detach() * counted).view_as(hidden),
        "hidden": torch.zeros_like(hidden).flatten(0, 1).index_add_(0, whole, grads[0]).view_as(hidden),
        **dict(zip(names, grads[1:], strict=True)),
    }
    for share in shares.values():
        dist.all_reduce(share, group=group)
    return shares


def _oracle(layer: Any, case: DeltaCase, hidden: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Return the same from the formulas, row by row."""
    named = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    hidden = hidden.clone().requires_grad_()
    sections = layer.in_proj_split_sections
    *qkv, gate, beta, alpha = (hidden @ named["in_proj.weight"].T).split(sections, -1)
    log_decay = -named["A_log"].exp() * torch.log1p((alpha + named["dt_bias"]).exp())
    weight = named["conv1d.weight"][:, 0]
    bias = weight.new_zeros(weight.shape[0])
    heads = DeltaHeads(
        layer.num_k_heads_local_tp, layer.num_v_heads_local_tp, layer.key_head_dim, layer.value_head_dim
    )
    mixed = recurrence(case, (torch.cat(qkv, -1), log_decay, beta.sigmoid(), weight, bias), heads)
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + layer.config.layernorm_epsilon).sqrt()
    gated = (normed * (1 + named["out_norm.weight"])).flatten(-2) * F.silu(gate)
    out = gated @ named["out_proj.weight"].T
    grads = torch.autograd.grad(out, [hidden, *named.values()], grad_out)
    return {"out": out.detach(), "hidden": grads[0], **dict(zip(named, grads[1:], strict=True))}


def _errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        name: ((found[name] - wanted).abs().max() / wanted.abs().max()).item() for name, wanted in expected.items()
    }


def _difference_from_transformers(layer: Any, case: DeltaCase, hidden: Tensor, out: Tensor) -> float:
    """Return the largest difference of corrupted rows from those of Transformers after their clean prefix."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    theirs = Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(
            hidden_size=layer.hidden_size,
            num_hidden_layers=4,
            linear_num_key_heads=layer.num_key_heads,
            linear_num_value_heads=layer.num_value_heads,
            linear_key_head_dim=layer.key_head_dim,
            linear_value_head_dim=layer.value_head_dim,
            rms_norm_eps=layer.config.layernorm_epsilon,
        ),
        layer_idx=0,
    )
    named = dict(layer.named_parameters())
    *qkv, z, b, a = named["in_proj.weight"].split(layer.in_proj_split_sections)
    weights = {
        "in_proj_qkv.weight": torch.cat(qkv),
        "in_proj_z.weight": z,
        "in_proj_b.weight": b,
        "in_proj_a.weight": a,
        "conv1d.weight": named["conv1d.weight"],
        "A_log": named["A_log"],
        "dt_bias": named["dt_bias"],
        "norm.weight": 1 + named["out_norm.weight"],
        "out_proj.weight": named["out_proj.weight"],
    }
    theirs.load_state_dict(weights)
    worst = 0.0
    for start in range(0, case.length, case.block_size):
        stop = start + case.block_size
        rows = torch.cat([hidden[0, :start], hidden[1, start:stop]]).transpose(0, 1).float()
        with torch.no_grad():
            expected = theirs(rows)[0, start:]
        worst = max(worst, (out[1, start:stop, 0] - expected).abs().max().item() / expected.abs().max().item())
    return worst
