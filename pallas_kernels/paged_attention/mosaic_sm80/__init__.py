from pallas_kernels.paged_attention.mosaic_sm80.attention import MosaicSm80Attention

__all__ = ["MosaicSm80Attention"]
