"""Has `enable_scale_out`, like newer versions."""
