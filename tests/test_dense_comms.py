"""Whole small runs with dct on every path: resumed bit for bit, taken up by fewer ranks, shown."""

import numpy as np
import pytest
import torch

from tests.ranks import run_ranks
from tests.small_run import newest, same, taken_up, train

DCT = {"comms__name": "dct", "comms__dct__dense_sparsity": 0.9, "comms__dct__smallest": 20}


def _whole_and_cut(rank, world_size, whole, cut, rest):
    return [train(rank, world_size, cfg) for cfg in (whole, cut, rest)]


@pytest.mark.parametrize("mode", ["bsp", "het"])
def test_a_resumed_run_equals_a_whole_one_and_one_rank_takes_up_what_waits(cfg_of, mode):
    whole, cut, rest = (
        cfg_of(mode, name=name, train__max_steps=steps, **DCT) for name, steps in (("a", 16), ("b", 7), ("b", 16))
    )
    for (summary, weights), (middle, _), (resumed, found) in run_ranks(2, _whole_and_cut, whole, cut, rest):
        same(weights, found)
        for key in ("steps", "auc", "logloss", "comms", "dense_dct", "cache"):
            assert summary[key] == resumed[key], key
        assert summary["bytes"]["dense"] == resumed["bytes"]["dense"]
        assert set(summary["comms"].values()) == {"dct"}
        if mode == "het":
            assert summary["residue_age_max"] == resumed["residue_age_max"] > 0
        assert middle["dense_dct"]["values_sent"] < 0.25 * middle["dense_dct"]["values"]
        assert middle["steps"] == 7
    pending = torch.load(newest(cut) / "dense.pt", weights_only=True)["pending"]
    assert any(value.abs().max() > 0 for value in pending.values())
    alone = taken_up(0, 1, cfg_of(mode, name="c", checkpoint__resume=f"{cut.runs}/b", train__max_steps=20, **DCT))
    names = {id(parameter): name for name, parameter in alone._reducer._parameters.items()}
    carried = {names[id(parameter)]: value for parameter, value in alone._reducer._carried.items()}
    assert carried.keys() == pending.keys()
    for name, value in carried.items():
        np.testing.assert_array_equal(value, pending[name])
