# SPDX-License-Identifier: Apache-2.0
"""Every rule refuses what breaks it, by flag, value, rule and a value that works, and lets pass what does not."""

import importlib.util
import re
from pathlib import Path

import pytest

from megatron_csbp.configuration.argument_rules import check_before_megatron, check_vocabulary
from megatron_csbp.configuration.own_geometries import check_own_geometries
from megatron_csbp.configuration.unsupported_features import UNSUPPORTED
from tests.support.megatron_arguments import VALID, parse


def check(command_line: str) -> None:
    check_before_megatron(*parse(command_line))


def refusal(flags: str, base: str = VALID) -> str:
    with pytest.raises(ValueError, match="--") as error:
        check(f"{base} {flags}")
    return str(error.value)


DELTA_NETS = "--experimental-attention-variant gated_delta_net --swiglu --num-layers 4"

REFUSED = {
    "gated delta nets nowhere": (DELTA_NETS, "needs --linear-attention-freq", "4 makes three of four"),
    "linear attention of no kind": (
        "--linear-attention-freq 4",
        "--linear-attention-freq 4",
        "add --experimental-attention-variant gated_delta_net",
    ),
    "gated delta nets without SiLU": (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --num-layers 4",
        "--experimental-attention-variant gated_delta_net",
        "needs --swiglu",
    ),
    "heads of gated delta nets that the ranks do not divide": (
        f"{DELTA_NETS} --linear-attention-freq 4 --linear-num-key-heads 2 --bp-size 4 --context-parallel-size 4",
        "--linear-num-key-heads 2 must be a multiple",
        "which is 4",
        "one of 1, 2 work",
    ),
    "a frequency of gated delta nets for other layers": (
        f"{DELTA_NETS} --num-layers 4 --linear-attention-freq [1,1,0]",
        "--linear-attention-freq [1, 1, 0] has 3 entries and --num-layers is 4",
        "for example ([1]*3+[0])*1",
    ),
    "gated delta nets alone": (
        f"{DELTA_NETS} --num-layers 3 --linear-attention-freq 4",
        "--linear-attention-freq 4 makes all 3 layers gated delta nets",
        "as --linear-attention-freq 3 makes the last one",
    ),
    "gated delta nets alone, layer by layer": (
        f"{DELTA_NETS} --num-layers 2 --linear-attention-freq [1,1]",
        "makes all 2 layers gated delta nets",
    ),
    "a frequency of no layer": (f"{DELTA_NETS} --linear-attention-freq 0", "--linear-attention-freq 0", "at least 1"),
    "a convolution that looks at no other row": (
        f"{DELTA_NETS} --linear-attention-freq 4 --linear-conv-kernel-dim 1",
        "--linear-conv-kernel-dim 1 must be at least 2",
    ),
    "value heads that key heads do not divide": (
        f"{DELTA_NETS} --linear-attention-freq 4 --linear-num-key-heads 4 --linear-num-value-heads 6",
        "--linear-num-value-heads 6 must be a multiple of --linear-num-key-heads 4, for example 8",
    ),
    "no states of gated delta nets": (
        f"{DELTA_NETS} --linear-attention-freq 4 --csbp-delta-net-state-mib 0",
        "--csbp-delta-net-state-mib 0",
        "256 is the default",
    ),
    "the recomputed norm of gated delta nets": (
        f"{DELTA_NETS} --linear-attention-freq 4 --recompute-granularity selective --recompute-modules gdn_norm_out",
        "--recompute-modules gdn_norm_out",
        "--recompute-granularity full",
    ),
    "key/value heads that do not divide the heads": (
        "--num-attention-heads 4 --group-query-attention --num-query-groups 3",
        "--num-query-groups 3 must divide --num-attention-heads 4",
        "1, 2, 4 work",
    ),
    "heads that tensor parallelism does not divide": (
        "--num-attention-heads 4 --tensor-model-parallel-size 3",
        "--tensor-model-parallel-size 3",
        "--num-attention-heads 4",
        "1, 2, 4 work",
    ),
    "whole validation sets beside a test set": (
        "--full-validation --multiple-validation-sets --data-path d --split 90,5,5",
        "--full-validation --multiple-validation-sets with a test set",
        "--split 99,1,0",
    ),
    "a whole validation set by itself": (
        "--full-validation",
        "--full-validation without --multiple-validation-sets",
        "give both",
    ),
    "a block of no tokens": (
        "--diffusion-block-size 0",
        "--diffusion-block-size 0 must be at least 1 token; 32 is a usual value.",
    ),
    "a block-parallel size of 0": ("--bp-size 0", "--block-parallel-size 0 must be at least 1"),
    "a context-parallel size below 0": ("--context-parallel-size -2", "--context-parallel-size -2 must be at least 1"),
    "unequal sizes above 1": (
        "--bp-size 2 --context-parallel-size 4",
        "--block-parallel-size 2 differs from --context-parallel-size 4",
        "both name the same ranks",
        "--context-parallel-size 2 --block-parallel-size 2",
    ),
    "context parallelism that forgets block parallelism": (
        "--context-parallel-size 4",
        "--context-parallel-size 4 with --diffusion-block-size and without --bp-size is ambiguous",
        "--bp-size 4 for CSBP",
        "--context-scheme cp to run the CP baseline on purpose",
    ),
    "the baseline beside block parallelism": (
        "--context-parallel-size 2 --bp-size 2 --context-scheme cp",
        "--context-scheme cp is the baseline on --context-parallel-size ranks alone",
        "Leave it out for CSBP",
    ),
    "the baseline on one rank": ("--context-scheme cp", "--context-scheme cp", "above 1 without --bp-size"),
    "no corrupted views": (
        "--corrupted-views 0",
        "--corrupted-views 0 must be at least 1 copy of a sample; 1 is the default.",
    ),
    "a window that looks ahead": (
        "--window-size 128,64",
        "--window-size 128,64 must be LEFT,0",
        "--window-size 1023,0",
    ),
    "a window without an end": ("--window-size=-1,0", "--window-size -1,0 must be LEFT,0", "leave it out for full"),
    "a length that blocks do not divide": (
        "--seq-length 60",
        "--seq-length 60 must be a multiple of the diffusion block size 8",
        "56 or 64",
    ),
    "a length that the chunks of csbp do not divide": (
        "--seq-length 72 --bp-size 2 --context-parallel-size 2",
        "--seq-length 72 must be a multiple of 2 x 2 ranks x block size 8 = 32",
        "64 or 96",
    ),
    "a length that the chunks of cp do not divide": (
        "--seq-length 72 --context-parallel-size 2 --context-scheme cp",
        "--seq-length 72",
        "64 or 96",
    ),
    "a length that the chunks of pure bp do not divide": (
        "--seq-length 72 --bp-size 2",
        "--seq-length 72",
        "64 or 96",
    ),
    "a length shorter than one block": ("--seq-length 4", "--seq-length 4 must be a multiple", "work: 8."),
    "rows that tensor ranks do not divide under sequence parallelism": (
        "--seq-length 8 --tensor-model-parallel-size 3 --sequence-parallel",
        "--sequence-parallel splits the 16 rows",
        "--seq-length 8",
        "--tensor-model-parallel-size 3",
        "for example --seq-length 48",
    ),
    "a ledger in a folder that is not there": (
        "--csbp-ledger nowhere/bytes.jsonl",
        "--csbp-ledger nowhere/bytes.jsonl names a folder that does not exist",
        "make nowhere",
        "--csbp-ledger bytes.jsonl",
    ),
    "full recomputation without a method": (
        "--recompute-granularity full --recompute-num-layers 1",
        "--recompute-granularity full needs --recompute-method",
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "full recomputation without a number of layers": (
        "--recompute-granularity full --recompute-method uniform",
        "needs --recompute-method and --recompute-num-layers",
    ),
    "a recomputed MLP with biases": (
        "--recompute-granularity selective --recompute-modules mlp",
        "--recompute-modules mlp hangs",
        "use --disable-bias-linear",
    ),
    "a checkpoint folder that is a file": (
        f"--save {__file__}",
        f"--save {__file__} is a file and has to be a folder",
        f"for example --save {Path(__file__).parent / 'save'}",
    ),
    "a ledger that is a folder": (
        "--csbp-ledger .",
        "--csbp-ledger . is a folder",
        "for example --csbp-ledger bytes.jsonl",
    ),
    "a tokenizer that is a file": (
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {__file__}",
        f"--tokenizer-model {__file__} is a file",
        f"use --tokenizer-model {Path(__file__).parent}.",
    ),
    "head groups that do not divide the key/value heads": (
        "--group-query-attention --num-attention-heads 16 --num-query-groups 8 --csbp-head-groups 3",
        "--csbp-head-groups 3 must divide the 8 key/value heads of a tensor-parallel rank",
        "use 1 or 2 or 4 or 8.",
    ),
    "head groups that only divide the key/value heads of all tensor-parallel ranks": (
        "--group-query-attention --num-attention-heads 16 --num-query-groups 8 --tensor-model-parallel-size 4 "
        "--csbp-head-groups 4",
        "--csbp-head-groups 4 must divide the 2 key/value heads",
        "(--tensor-model-parallel-size 4); use 1 or 2.",
    ),
    "no head groups at all": (
        "--num-attention-heads 4 --csbp-head-groups 0",
        "--csbp-head-groups 0 must divide the 4 key/value heads",
    ),
    "a negative number of rows in a chunk of the loss": (
        "--csbp-loss-chunk-rows -1",
        "--csbp-loss-chunk-rows -1 must be at least 0",
        "4096 is a usual value",
    ),
    "a mask id below 0": ("--mask-token-id -1", "--mask-token-id -1 must be at least 0; for example 100."),
    "a diffusion loss without weight": (
        "--diffusion-objective nemotron --diffusion-loss-weight 0",
        "--diffusion-loss-weight 0.0 must be a number above 0. Use 0.3.",
    ),
    "a weight of the only term of the loss": (
        "--diffusion-loss-weight 0.5",
        "--diffusion-loss-weight 0.5: the loss of --diffusion-objective block-diffusion has one term, of weight 1",
        "leave the flag out",
    ),
    "a diffusion loss weight that is no number": (
        "--diffusion-objective nemotron --diffusion-loss-weight nan",
        "--diffusion-loss-weight nan must be",
    ),
    "an autoregressive loss weight below 0": (
        "--diffusion-objective nemotron --ar-loss-weight -1",
        "--ar-loss-weight -1.0 must be a number, 0 or more. Use 1.0.",
    ),
    "an autoregressive loss of the block-diffusion objective": (
        "--ar-loss-weight 0.5",
        "--ar-loss-weight 0.5: --diffusion-objective block-diffusion has no autoregressive loss",
        "Use --diffusion-objective nemotron, or leave the flag out",
    ),
    "an autoregressive loss under block-causal clean attention": (
        "--diffusion-objective nemotron --clean-attention block-causal",
        "--clean-attention block-causal with --ar-loss-weight 1.0",
        "would see the next token",
        "use --clean-attention token-causal or --ar-loss-weight 0",
    ),
    "a query scale without a slope": ("--query-scale-beta 0", "--query-scale-beta 0.0 must be above 0; 0.1 is"),
    "a query scale without a length": (
        "--query-scale-beta 0.1",
        "--query-scale-beta 0.1 needs --yarn-original-max-position-embeddings",
        "for example 16384",
    ),
    "a smallest noise level of 0": ("--noise-eps 0", "--noise-eps 0.0 must be above 0 and at most 1", "Use 1e-3"),
    "a smallest noise level above 1": ("--noise-eps 1.5", "--noise-eps 1.5 must be above 0 and at most 1"),
    "a noise schedule that nemotron does not have": (
        "--diffusion-objective nemotron --noise-schedule cosine",
        "--noise-schedule cosine: --diffusion-objective nemotron is defined with log-linear only",
        "Use --noise-schedule log-linear",
    ),
    "attention dropout": (
        "--attention-dropout 0.1",
        "--attention-dropout 0.1 is not supported",
        "cannot share a dropout mask",
        "use --attention-dropout 0",
    ),
    "an auxiliary loss that would count clean tokens twice": (
        "--bp-size 2 --num-experts 4 --moe-aux-loss-coeff 0.1",
        "--moe-aux-loss-coeff [0.1] counts the router's tokens",
        "--block-parallel-size 2 alone",
        "use CSBP (--context-parallel-size 2 as well)",
    ),
    "one of several auxiliary losses that would": (
        "--bp-size 2 --num-experts 4 --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff 0 0.1",
        "--moe-aux-loss-coeff [0.0, 0.1]",
    ),
    "a z-loss that would": ("--bp-size 2 --num-experts 4 --moe-z-loss-coeff 0.1", "--moe-z-loss-coeff 0.1 counts"),
    "a capacity that would": (
        "--bp-size 2 --num-experts 4 --moe-expert-capacity-factor 1.5",
        "--moe-expert-capacity-factor 1.5 counts",
    ),
    "an expert bias that would": (
        "--bp-size 2 --num-experts 4 --moe-router-enable-expert-bias",
        "--moe-router-enable-expert-bias counts",
    ),
    "a balanced assignment that would": (
        "--bp-size 2 --num-experts 4 --moe-router-load-balancing-type sinkhorn",
        "--moe-router-load-balancing-type sinkhorn counts",
    ),
    "position embeddings of other kinds": (
        "--position-embedding-type mrope",
        "--position-embedding-type mrope is not supported",
        "use rope, yarn, learned_absolute or none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    flags, *said = REFUSED[case]
    message = refusal(flags)
    assert [part for part in said if part not in message] == []


def test_refuses_a_run_without_an_interval_of_evaluation() -> None:
    without = VALID.replace(" --eval-interval 10", "")
    assert refusal("--eval-iters 0", without).startswith("--eval-interval is not given")
    check(f"{without} --skip-train")
    check(f"{without} --full-validation --multiple-validation-sets --split 99,1,0")


def test_refuses_fewer_ranks_than_the_sizes_need() -> None:
    args, given = parse(f"{VALID} --bp-size 2 --context-parallel-size 2 --tensor-model-parallel-size 2")
    args.world_size = 6
    with pytest.raises(ValueError, match="multiple of 4 ranks, and this job has 6") as error:
        check_before_megatron(args, given)
    assert "--tensor-model-parallel-size 2 --context-parallel-size 2 --block-parallel-size 2" in str(error.value)
    assert "torchrun --nproc-per-node 4" in str(error.value)
    args.world_size = 8
    check_before_megatron(args, given)


def test_ranks_on_several_nodes_are_counted_in_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    args, given = parse(f"{VALID} --bp-size 4 --context-parallel-size 4 --tensor-model-parallel-size 8")
    args.world_size = 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"has 16 .*start it on 4 nodes of 8, for example: torchrun --nnodes 4\."):
        check_before_megatron(args, given)


@pytest.mark.parametrize("objective", ["block-diffusion", "nemotron", "fast-dllm-v2"])
def test_the_mask_id_may_be_left_to_the_tokenizer(objective: str) -> None:
    check(f"--seq-length 64 --eval-interval 10 --diffusion-block-size 8 --diffusion-objective {objective}")


def test_refuses_a_missing_length() -> None:
    assert refusal("", "--diffusion-block-size 8 --mask-token-id 190").startswith("--seq-length is not given")


ACCEPTED = {
    "gated delta nets": f"{DELTA_NETS} --linear-attention-freq 4 --bp-size 2 --context-parallel-size 2",
    "gated delta nets, layer by layer": f"{DELTA_NETS} --num-layers 4 --linear-attention-freq [1,0,0,1]",
    "one key/value head under tensor parallelism": (
        "--num-attention-heads 4 --group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2"
    ),
    "one rank": "",
    "one token in a block": "--diffusion-block-size 1",
    "one block in a sequence": "--diffusion-block-size 64",
    "a block size that is no power of two": "--diffusion-block-size 48 --seq-length 192 --bp-size 2",
    "three blocks in a chunk": "--diffusion-block-size 4 --seq-length 48 --bp-size 2 --context-parallel-size 2",
    "csbp": "--bp-size 4 --context-parallel-size 4",
    "pure bp": "--block-parallel-size 4",
    "cp, asked for by name": "--context-parallel-size 4 --context-scheme cp",
    "two views": "--corrupted-views 2 --bp-size 2 --context-parallel-size 2",
    "a window": "--window-size 15,0",
    "a window of a row's own position": "--window-size 0,0",
    "windows of blocks in some layers": "--window-size 1023,0 --window-attn-skip-freq 6 --window-anchor block",
    "sequence parallelism": "--tensor-model-parallel-size 2 --sequence-parallel --bp-size 2 --context-parallel-size 2",
    "mask id 0": "--mask-token-id 0",
    "nemotron": "--diffusion-objective nemotron",
    "nemotron with weights": "--diffusion-objective nemotron --diffusion-loss-weight 1e-3 --ar-loss-weight 2",
    "block-causal clean attention without an autoregressive loss": (
        "--diffusion-objective nemotron --clean-attention block-causal --ar-loss-weight 0"
    ),
    "no autoregressive loss, said aloud": "--ar-loss-weight 0",
    "token-causal clean attention": "--clean-attention token-causal",
    "every schedule of block-diffusion": "--noise-schedule cosine",
    "a large smallest noise level": "--noise-eps 0.999",
    "a query scale": "--query-scale-beta 0.1 --yarn-original-max-position-embeddings 16384",
    "attention dropout of 0, said aloud": "--attention-dropout 0",
    "experts that balance themselves, on csbp": (
        "--bp-size 2 --context-parallel-size 2 --num-experts 4 --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
    ),
    "experts on pure bp": "--bp-size 2 --num-experts 4",
    "experts that balance themselves, on one rank": "--num-experts 4 --moe-aux-loss-coeff 0.1",
    "yarn": "--position-embedding-type yarn",
    "learned positions": "--position-embedding-type learned_absolute",
    "no positions": "--position-embedding-type none",
    "a whole validation set in a list": "--full-validation --multiple-validation-sets",
    "a group for each head": "--num-attention-heads 12 --csbp-head-groups 12 --bp-size 2 --context-parallel-size 2",
    "all rows of logits at once": "--csbp-loss-chunk-rows 0",
    "gradients in fp32": "--bf16 --csbp-grad-reduce-dtype fp32",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepts(case: str) -> None:
    check(f"{VALID} {ACCEPTED[case]}")


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--micro-batch-size 2", "--micro-batch-size 2: .*Use --micro-batch-size 1"),
        (
            "--micro-batch-size 1 --eval-micro-batch-size 4",
            "--eval-micro-batch-size 4: .*Use --eval-micro-batch-size 1",
        ),
        (
            "--micro-batch-size 1 --num-experts 4 --pipeline-model-parallel-size 2",
            "--moe-token-dispatcher-type allgather with .*Use --moe-token-dispatcher-type alltoall",
        ),
        (
            "--micro-batch-size 1 --tensor-model-parallel-size 3 --sequence-parallel",
            "--diffusion-block-size 8 must be a multiple of --tensor-model-parallel-size 3, for example 9",
        ),
        (
            f"--micro-batch-size 1 {DELTA_NETS} --linear-attention-freq 4 --context-scheme cp "
            "--context-parallel-size 2",
            "--context-scheme cp with --experimental-attention-variant gated_delta_net.*Use --bp-size 2 for CSBP",
        ),
    ],
)
def test_samples_with_geometries_of_their_own_come_one_by_one(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_own_geometries(parse(f"{VALID} {flags}")[0])
    check_own_geometries(parse(f"{VALID} --micro-batch-size 1")[0])
    check_own_geometries(parse(f"{VALID} --micro-batch-size 1 --tensor-model-parallel-size 3")[0])


@pytest.mark.parametrize("length", [1, 63, 100, 8191])
@pytest.mark.parametrize("block_size", [1, 3, 48])
@pytest.mark.parametrize(
    "scheme",
    ["", "--context-parallel-size 3 --context-scheme cp", "--bp-size 4", "--bp-size 5 --context-parallel-size 5"],
)
def test_lengths_that_an_error_suggests_work(length: int, block_size: int, scheme: str) -> None:
    flags = f"{VALID} --diffusion-block-size {block_size} {scheme}"
    try:
        check(f"{flags} --seq-length {length}")
    except ValueError as error:
        suggested = re.findall(r"\d+", str(error).rpartition("work:")[2])
        assert suggested
        for works in suggested:
            check(f"{flags} --seq-length {works}")
    else:
        assert length % block_size == 0


def test_the_length_that_the_sequence_parallel_error_suggests_works() -> None:
    flags = "--bp-size 2 --context-parallel-size 2 --tensor-model-parallel-size 5 --sequence-parallel"
    suggested = re.search(r"for example --seq-length (\d+)", refusal(flags))
    assert suggested is not None
    check(f"{VALID} {flags} --seq-length {suggested[1]}")


ASKED_FOR = {
    "cp_comm_type": "--cp-comm-type a2a",
    "mtp_num_layers": "--mtp-num-layers 1",
    "multi_latent_attention": "--multi-latent-attention",
    "cuda_graph_impl": "--cuda-graph-impl local",
    "enable_cuda_graph": "--enable-cuda-graph",
    "external_cuda_graph": "--external-cuda-graph",
    "rampup_batch_size": "--rampup-batch-size 2 2 300",
    "iterations_to_skip": "--iterations-to-skip 3 4",
    "result_rejected_tracker_filename": "--result-rejected-tracker-filename rejected.txt",
    "dataloader_type": "--dataloader-type external",
    "ckpt_format": "--ckpt-format torch",
    "sft": "--sft",
    "fim_data": "--fim-data",
    "allow_ambiguous_pad_tokens": "--allow-ambiguous-pad-tokens",
    "softmax_type": "--softmax-type learnable",
    "qk_clip": "--qk-clip",
    "log_max_attention_logit": "--log-max-attention-logit",
    "apply_query_key_layer_scaling": "--apply-query-key-layer-scaling",
    "experimental_attention_variant": "--experimental-attention-variant dsa",
    "hybrid_layer_pattern": "--hybrid-layer-pattern M*-M",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path layers.json",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json {}",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes 2 2",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "reset_attention_mask": "--reset-attention-mask",
    "reset_position_ids": "--reset-position-ids",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "perform_rl_step": "--perform-rl-step",
    "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
    "logits_load_dir": "--logits-load-dir logits",
    "attention_backend": "--attention-backend local",
    "ddp_average_in_collective": "--ddp-average-in-collective",
    "init_model_with_meta_device": "--init-model-with-meta-device",
}
NO_FLAG_IN_MEGATRON_0_19 = {
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
}


def test_every_unsupported_feature_is_tested() -> None:
    names = [feature.name for feature in UNSUPPORTED]
    assert sorted(names) == sorted(ASKED_FOR | NO_FLAG_IN_MEGATRON_0_19)


@pytest.mark.parametrize("name", ASKED_FOR)
def test_refuses_by_name(name: str) -> None:
    flags = ASKED_FOR[name]
    message = refusal(flags)
    assert message.startswith(flags.split()[0])
    assert "is not supported with --diffusion-block-size: " in message
    check(flags)  # plain Megatron may have it


@pytest.mark.parametrize("name", NO_FLAG_IN_MEGATRON_0_19)
def test_refuses_by_name_what_other_megatrons_have_a_flag_for(name: str) -> None:
    args, given = parse(VALID)
    assert not hasattr(args, name)
    setattr(args, name, NO_FLAG_IN_MEGATRON_0_19[name])
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}.* is not supported"):
        check_before_megatron(args, given)


@pytest.mark.parametrize(
    "flags",
    [
        "--bp-size 2",
        "--mask-token-id 5",
        "--diffusion-objective nemotron",
        "--clean-attention token-causal",
        "--diffusion-loss-weight 1",
        "--ar-loss-weight 1",
        "--noise-schedule log",
        "--noise-eps 0.1",
        "--query-scale-beta 0.1",
        "--block-assignment contiguous",
        "--csbp-attention-backend torch",
    ],
)
def test_refuses_block_diffusion_flags_without_a_block_size(flags: str) -> None:
    message = refusal(flags, "--seq-length 64")
    assert flags.split()[0].replace("--bp-size", "--block-parallel-size") in message
    assert "--diffusion-block-size 32" in message


def test_plain_megatron_passes() -> None:
    check("--seq-length 63 --attention-dropout 0.1 --context-parallel-size 2")


def test_refuses_a_mask_id_outside_the_padded_vocabulary() -> None:
    args, _ = parse(f"{VALID} --mask-token-id 192")
    args.padded_vocab_size = 192
    with pytest.raises(
        ValueError, match="--mask-token-id 192 is outside the padded vocabulary of 192 tokens; use an id below 192"
    ):
        check_vocabulary(args)


def test_refuses_the_end_of_a_document_as_mask_id() -> None:
    args, _ = parse(f"{VALID} --mask-token-id 0")
    args.padded_vocab_size = 192
    check_vocabulary(args, eod_token_id=1)
    with pytest.raises(ValueError, match="--mask-token-id 0 is the tokenizer's end of a document"):
        check_vocabulary(args, eod_token_id=0)


def test_accepts_a_mask_id_in_the_padding_of_the_vocabulary() -> None:
    args, _ = parse(f"{VALID} --mask-token-id 191")
    args.padded_vocab_size = 192
    check_vocabulary(args)


@pytest.mark.parametrize("module", ["layernorm", "moe_act"])
def test_modules_that_megatron_recomputes_by_transformer_engine_are_refused_without_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"--recompute-granularity selective --recompute-modules core_attn {module}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(flags).startswith(f"--recompute-modules {module} needs Transformer Engine, which is not installed")
    check(f"{VALID} --recompute-granularity selective --recompute-modules core_attn mlp --disable-bias-linear")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check(f"{VALID} {flags}")
