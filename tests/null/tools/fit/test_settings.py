"""Which settings are weighed, and how they are given."""

from __future__ import annotations

import pytest
from null.tools.fit.alike_layers import asked

from zero_compiler.config import Config
from zero_compiler.tools.fit.settings import REMADE, Setting, settings, tiers_of


def test_what_was_asked_for_is_not_set_otherwise(tmp_path):
    every = list(settings(asked(tmp_path, stage=2, nvme_bytes=1 << 40), 4, None, False))
    assert {s.stage for s in every} == {2}
    assert {s.batch for s in every} == {8}
    states = list(settings(asked(tmp_path, offload_optimizer="nvme", nvme_bytes=1 << 40), 4, None, False))
    assert all(s.tiers == {"optimizer": "nvme"} for s in states)


def test_tiers_are_those_that_the_machine_has(tmp_path):
    assert tiers_of(asked(tmp_path)) == ()  # on CPU ranks the host is the device
    assert tiers_of(asked(tmp_path, nvme_bytes=1 << 40)) == ("nvme",)


def test_micro_batches_make_up_a_global_batch(tmp_path):
    found = list(settings(asked(tmp_path), 4, 64, True))
    assert found
    assert all(4 * s.batch * s.micro_batches == 64 for s in found)


@pytest.mark.parametrize("world", [1, 2, 12])
def test_replicas_divide_the_ranks_and_leave_some_to_shard_over(tmp_path, world):
    found = list(settings(asked(tmp_path), world, None, False))
    assert found
    assert all(world % s.replicas == 0 and (s.replicas == 1 or s.ranks > 1) for s in found)


def test_fields_of_a_setting_are_fields_of_config(tmp_path):
    setting = Setting(4, 3, 2, {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}, REMADE, 8, 2, 1000)
    change = setting.change({"nvme_dir": str(tmp_path)})
    assert Config.make(None, {**change.fields, "nvme_dir": str(tmp_path)}).offload_params == "nvme"
    assert change.flags().startswith(
        "--world 4 --batch 8 --replicas 2 --gradient-accumulation-steps 2 --stage 3"
    )
    assert "--activation-budget-bytes 1000" in change.flags()
