import pytest

from hetrain.config import PlannerConfig, RowOptimizerConfig
from hetrain.errors import ConfigError
from hetrain.planner.piece import SHARDING_TYPES
from hetrain.planner.request import options_of

ROWWISE, ADAGRAD = RowOptimizerConfig("rowwise_adagrad"), RowOptimizerConfig("adagrad")


def options(engine, mode, rows, **planner):
    return options_of(PlannerConfig(**planner), engine, mode, rows, {"a"})


def test_what_an_engine_trains_is_what_it_is_planned_with():
    assert options("torchrec", "bsp", ADAGRAD, sharding_types=None).sharding_types == SHARDING_TYPES
    by_rows = ("data_parallel", "table_wise", "row_wise", "table_row_wise")
    assert options("torchrec", "bsp", ROWWISE, sharding_types=None).sharding_types == by_rows
    for mode in ("het", "ssp", "asp"):  # data_parallel, in the default list, is passed over
        assert options("store", mode, ADAGRAD).sharding_types == ("table_wise", "row_wise")


def test_what_an_engine_cannot_train_is_refused():
    with pytest.raises(ConfigError, match=r"column_wise with optimizer\.rows\.name=rowwise_adagrad"):
        options("torchrec", "bsp", ROWWISE, sharding_types=["table_wise", "column_wise"])
    with pytest.raises(ConfigError, match=r"table_row_wise cannot run with consistency\.mode=het"):
        options("store", "het", ADAGRAD, sharding_types=["table_wise", "table_row_wise"])
    with pytest.raises(ConfigError, match=r"at least one of table_wise, row_wise with consistency\.mode=asp"):
        options("store", "asp", ADAGRAD, sharding_types=["data_parallel"])
