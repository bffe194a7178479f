# SPDX-License-Identifier: Apache-2.0
"""The forward step never waits for the device: on meta tensors, whose values nobody can ask for, it runs through.

Shapes: S rows, B micro-batch, H hidden size, R rows with loss, V vocabulary.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_csbp import forward_step, megatron_compat, megatron_model
from megatron_csbp.forward_step import BlockDiffusionForwardStep
from megatron_csbp.objectives import OBJECTIVES, ObjectiveConfig, build_objective
from megatron_csbp.reporting.model_flops import ModelFlops
from megatron_csbp.transformer.geometry.layer_plans import LayerPlans, layer_plans
from megatron_csbp.transformer.geometry.sample import Sample
from megatron_csbp.transformer.geometry.scheme import Sharding
from megatron_csbp.transformer.sample_params import SampleParams
from tests.unit_tests.objectives.support import single

LENGTH, H, V = 32, 8, 64
META = torch.device("meta")


class OutputLayer:
    """Like Megatron's.

    Attributes:
        sequence_parallel: as of its own.
    """

    sequence_parallel = False

    def __call__(self, rows_R1H: Tensor, weight: Tensor) -> tuple[Tensor, None]:
        return rows_R1H @ weight.t(), None


class MetaModel:
    """A stage whose tensors have no values.

    Attributes:
        training: as of a module.
        params: what the last call was given as `packed_seq_params`.
        config: what the output processor reads of Megatron's.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.params: Any = None
        self.config = SimpleNamespace(sequence_parallel=False, gradient_accumulation_fusion=False)
        self.weight = torch.zeros(V, H, device=META, requires_grad=True)

    def __call__(self, tokens_BS: Tensor, positions_BS: Tensor, mask: None, **options: Any) -> Tensor:
        assert (tokens_BS.device, positions_BS.device, mask) == (META, META, None)
        self.params = options["packed_seq_params"]
        hidden_SBH = torch.zeros(*tokens_BS.t().shape, H, device=META, requires_grad=True)
        losses_R: Tensor = options["output_processor"](
            hidden_states=hidden_SBH,
            output_layer=OutputLayer(),
            output_weight=self.weight,
            compute_language_model_loss=lambda targets, logits: (
                -logits.gather(2, targets.t()[..., None]).squeeze(2).t()
            ),
            scale_logits=lambda logits: logits,
            config=self.config,
            context=options["output_processor_context"],
        )
        return losses_R


@pytest.fixture(autouse=True)
def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def no_timer() -> Iterator[None]:
        yield

    monkeypatch.setattr(megatron_compat, "current_device", lambda: META)
    monkeypatch.setattr(megatron_compat, "batch_timer", no_timer)
    monkeypatch.setattr(megatron_compat, "context_parallel_rank", lambda: 0)
    monkeypatch.setattr(megatron_compat, "stage_needs_batch", lambda model: model is not None)
    monkeypatch.setattr(megatron_model, "use_rows_in_rotary", lambda model, rows: None)
    monkeypatch.setattr(megatron_compat, "first_vocabulary_id", lambda local, padded: 0)
    # Megatron's check of the loss is one that a flag turns on.
    monkeypatch.setattr(megatron_compat, "check_loss", lambda loss, args: None)
    monkeypatch.setattr(ModelFlops, "count_micro_batch", lambda *args: None)
    monkeypatch.setattr(forward_step, "static_plans", lambda args, rank: LayerPlans(single(LENGTH, 4)))


def step_of(name: str) -> BlockDiffusionForwardStep:
    args = SimpleNamespace(mask_token_id=63, padded_vocab_size=V, csbp_loss_chunk_rows=5)
    return BlockDiffusionForwardStep(args, build_objective(ObjectiveConfig(name=name, mask_token_id=63)))  # type: ignore[arg-type]


def batch_of(num_rows: int, plans: LayerPlans | None = None) -> dict[str, Any]:
    batch = {
        "tokens": torch.zeros(1, num_rows, dtype=torch.int64),
        "position_ids": torch.zeros(1, num_rows, dtype=torch.int64),
        "labels": torch.zeros(1, num_rows, dtype=torch.int64),
        "loss_weights": torch.ones(1, num_rows),
        "num_tokens": torch.tensor([num_rows]),
        "num_supervised": torch.tensor([num_rows]),
    }
    return batch if plans is None else batch | {"plans": plans}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_asks_the_device_for_a_value(name: str, training: bool) -> None:
    model = MetaModel(training)
    losses_R, loss_of = step_of(name)(iter([batch_of(2 * LENGTH)]), model)
    assert losses_R.shape == (2 * LENGTH,)
    loss, num_tokens, reports = loss_of(losses_R)
    assert {loss.device, num_tokens.device, *(value.device for value in reports.values())} == {META}
    assert ("nelbo" in reports) == (not training)


def test_a_value_that_is_asked_for_would_show() -> None:
    for ask in (Tensor.item, Tensor.tolist, Tensor.cpu, bool, Tensor.nonzero):
        with pytest.raises((RuntimeError, NotImplementedError)):
            ask(torch.ones(1, device=META))  # type: ignore[operator]


def test_plans_of_a_batch_go_with_the_call_and_stay_in_the_batch() -> None:
    """Megatron's rerun machine keeps batches, to run them again."""
    plans = layer_plans(Sample(LENGTH, 4, active=[[True] + [False] * 7]), Sharding(), 0)  # type: ignore[arg-type]
    model, batch = MetaModel(training=True), batch_of(LENGTH + 4, plans)
    step_of("nemotron")(iter([batch]), model)
    assert isinstance(model.params, SampleParams)
    assert model.params.plans is plans
    assert batch["plans"] is plans
    step_of("nemotron")(iter([batch_of(2 * LENGTH)]), model)
    assert model.params is None
