"""What becomes of a refusal when a layer is built: a ValueError in code, one line in a training."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from monta_megatron.integration import arguments, dispatcher
from monta_megatron.integration.layer import build_with_monta

pytestmark = pytest.mark.old_end

REASON = "moe_monta_chain: hierarchical_alltoall cannot run here: uneven nodes"


def build(reports: bool = True) -> None:
    layer = SimpleNamespace(num_local_experts=1, local_expert_indices=[0])
    config = SimpleNamespace(moe_token_dispatcher_type="monta")

    def construct(*args: Any, **kwargs: Any) -> None:
        """Megatron's constructor, which does not matter here."""

    groups = SimpleNamespace(tp_ep=None)
    with (
        mock.patch.object(dispatcher, "MontaTokenDispatcher", side_effect=ValueError(REASON)),
        mock.patch("monta_megatron.integration.layer.reports_for_stage", return_value=reports),
    ):
        build_with_monta(construct, layer, config, pg_collection=groups)


def test_in_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_checked", [])
    with pytest.raises(ValueError, match=REASON):
        build()


@pytest.mark.parametrize("reports", [True, False])
def test_in_a_training(
    reports: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks of a pipeline stage end alike; the first one says why."""
    monkeypatch.setattr(arguments, "_checked", [])
    monkeypatch.setattr(arguments, "linger", lambda: None)
    module = SimpleNamespace(validate_args=lambda args: args)
    arguments.patch_arguments(module)
    module.validate_args(SimpleNamespace(moe_token_dispatcher_type="alltoall"))
    with pytest.raises(SystemExit) as end:
        build(reports)
    assert end.value.code == 2
    assert capsys.readouterr().err == (f"monta: error: {REASON}\n" if reports else "")


def test_process_groups_by_position() -> None:
    def construct(
        self: Any, config: Any, submodules: Any, layer_number: int, pg_collection: Any = None
    ) -> None:
        """Takes them as Megatron's does."""

    config, groups = SimpleNamespace(moe_token_dispatcher_type="monta"), SimpleNamespace()
    with mock.patch.object(dispatcher, "MontaTokenDispatcher") as made:
        build_with_monta(construct, mock.MagicMock(), config, None, 1, groups)
    assert made.call_args.kwargs["pg_collection"] is groups
