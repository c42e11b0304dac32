"""Shapes of well-known models, from their published configs."""

from headrace.inference.model_shape import LayerSizes, ModelShape

QWEN_05B = ModelShape(LayerSizes(896, 24, 14, 2, 64, 4864, 151936), 494_032_768)
"""Qwen2.5-0.5B."""
QWEN_4B = ModelShape(LayerSizes(2560, 36, 32, 8, 128, 9728, 151936), 4_022_468_096)
"""Qwen3-4B, and below its larger siblings."""
QWEN_8B = ModelShape(LayerSizes(4096, 36, 32, 8, 128, 12288, 151936), 8_190_735_360)
QWEN_14B = ModelShape(LayerSizes(5120, 40, 40, 8, 128, 17408, 151936), 14_768_307_200)
QWEN_30B_A3B = ModelShape(LayerSizes(2048, 48, 32, 4, 128, 6144, 151936, 128, 8, 768), 30_532_122_624)
QWEN_32B = ModelShape(LayerSizes(5120, 64, 64, 8, 128, 25600, 151936), 32_762_123_264)
