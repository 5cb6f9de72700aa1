"""What is there to be planned cannot be trained."""

from hetrain.config import RunConfig
from hetrain.errors import ConfigError


def check_trainable(cfg: RunConfig) -> None:
    """Raise ConfigError for a config of a table list."""
    if cfg.plan.tables is not None:
        raise ConfigError(
            f"plan.tables={cfg.plan.tables}: a list of tables can be planned, not trained: it has no examples.\n"
            "  `hetrain plan` with the same words plans it; +experiment=dlrm_bsp trains, on sample data or data=criteo."
        )
