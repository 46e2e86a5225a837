"""What becomes of a refusal when a layer is built: a UserError in code, one line in a training."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from monta_megatron.common.errors import UserError
from monta_megatron.integration import arguments, dispatcher, layer

pytestmark = pytest.mark.old_end

REASON = "moe_monta_chain: hierarchical_alltoall cannot run here: uneven nodes"


@pytest.fixture(autouse=True)
def refusing_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_command_line_seen", [])
    refuse = mock.Mock(side_effect=UserError(REASON))
    monkeypatch.setattr(dispatcher, "MontaTokenDispatcher", refuse)


def build() -> None:
    """A layer, but for Megatron's constructor, which does not matter here."""
    made = SimpleNamespace(num_local_experts=1, local_expert_indices=[0])
    config = SimpleNamespace(moe_token_dispatcher_type="monta")
    groups = SimpleNamespace(tp_ep=None)
    layer.build_with_monta(mock.Mock(), made, config, pg_collection=groups)


@pytest.mark.parametrize("reports", [True, False])
def test_in_a_training(
    reports: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks of a pipeline stage end alike; the first one says why."""
    monkeypatch.setattr(arguments, "linger", lambda: None)
    monkeypatch.setattr(layer, "reports_for_stage", lambda *groups: reports)
    with pytest.raises(UserError, match=REASON):
        build()
    # A training has checked its arguments.
    module = SimpleNamespace(validate_args=lambda args: args)
    arguments.patch_arguments(module)
    module.validate_args(SimpleNamespace(moe_token_dispatcher_type="alltoall"))
    with pytest.raises(SystemExit) as end:
        build()
    assert end.value.code == 2
    assert capsys.readouterr().err == (f"monta: error: {REASON}\n" if reports else "")


def test_process_groups_by_position() -> None:
    def construct(
        self: Any, config: Any, submodules: Any, layer_number: int, pg_collection: Any = None
    ) -> None:
        """Takes them as Megatron's does."""

    config, groups = SimpleNamespace(moe_token_dispatcher_type="monta"), SimpleNamespace()
    with mock.patch.object(dispatcher, "MontaTokenDispatcher") as made:
        made.return_value.setup.options.overlap_experts = False
        layer.build_with_monta(construct, mock.MagicMock(), config, None, 1, groups)
    assert made.call_args.kwargs["pg_collection"] is groups
