"""What a run tells: bytes per channel (traffic), metrics (run_log), the screen (console)."""

from hetrain.telemetry.traffic import CHANNELS, Traffic

__all__ = ["CHANNELS", "Traffic"]
