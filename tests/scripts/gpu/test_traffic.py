"""Bytes by hand."""

from scripts.gpu.traffic import kernel_bytes, least_bytes

HLO = """\
  %w = (bf16[512,16,8,128]{3,2,1,0}, f32[4,32]{1,0}) custom-call(%k.1, %cache), custom_call_target="__gpu$xla.gpu.triton", \
operand_layout_constraints={bf16[4,8,128]{2,1,0}, bf16[512,16,8,128]{3,2,1,0}, s32[4]{0}}, api_version=API, \
backend_config={name = "w"}
  %a = bf16[4,32,128]{2,1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", \
operand_layout_constraints={bf16[4,32,128]{2,1,0}}, api_version=API
  %g = f32[4096,4096]{1,0} custom-call(%q), custom_call_target="__cublas$gemm", operand_layout_constraints={f32[9]{0}}, a=1
"""  # noqa: E501


def test_arguments_and_results_of_pallas_kernels():
    beside = 4 * 32 * 4 + 4 * 8 * 128 * 2 + 4 * 4 + 2 * (4 * 32 * 128 * 2)
    assert kernel_bytes(HLO, [(512, 16, 8, 128)]) == beside
    assert kernel_bytes(HLO, []) == beside + 2 * 512 * 16 * 8 * 128 * 2


def test_least_bytes():
    # Two requests of 10 keys each, decoding: 18 keys are in the cache. 3 query heads, one kv head of 4, two bytes.
    read, written = 2 * 5 * 4 + 18 * 2 * 4, 2 * 2 * 4 + 2 * 3 * 4
    assert least_bytes(2, 20, 3, 1, 4) == 2 * (read + written)
