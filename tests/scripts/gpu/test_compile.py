"""What is read out of XLA's and Mosaic's texts."""

from scripts.gpu.compile import aliased_arguments, copies_of, mosaic_shared_bytes, pallas_names, thunk_shared_bytes
from scripts.gpu.launches import launches, per_layer

HLO = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (3, {}, may-alias), {1,0}: (4, {}, must-alias) }, \
entry_computation_layout={(bf16[256,8]{1,0})->bf16[256,8]{1,0}}, num_partitions=1

%fused (p: bf16[8]) -> bf16[8] {
  ROOT %copy.7 = bf16[512,16,8,128]{3,2,1,0} copy(%p)
}

ENTRY %main (k.1: bf16[256,8,128]) -> (bf16[512,16,8,128]) {
  %k.1 = bf16[256,8,128]{2,1,0} parameter(0)
  %copy.1 = bf16[256,8,128]{1,2,0} copy(%k.1)
  %copy-start.2 = (bf16[8192,8,128]{2,1,0}, bf16[8192,8,128]{2,1,0}, u32[]) copy-start(%cache)
  %call = bf16[512,16,8,128]{3,2,1,0} custom-call(%copy.1), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={debug = false, name = "kv_write", num_warps = 4 : i32}
  ROOT %pallas_call.0 = bf16[256,64,128]{2,1,0} custom-call(%call), custom_call_target="__gpu$xla.gpu.triton", \
backend_config={grid_x = 40 : i32, name = "paged_attn_fwd", num_stages = 3 : i32}
}
"""
THUNKS = """\
001: kCustomKernel [source       | next=005 (4)] loop_convert_fusion grid: [128, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
002: kSequential [prev=001 (1) | next=003 (1)] kSequential
  003: kCopy [source | sink] kCopy
004: kWhile kWhile
  005: kCustomKernel gemm_fusion_dot_1 grid: [24576, 1, 1] threads: [64, 1, 1]  shared_memory: 512 bytes
006: kCustomKernel [prev=008 (1) | next=010 (1)] paged_attn_fwd grid: [320, 8, 1] threads: [128, 1, 1]  shared_memory: 39168 bytes
007: kCustomKernel paged_attn_fwd_1 grid: [1, 1, 1] threads: [128, 1, 1]  shared_memory: 77 bytes
008: kCustomCall [source | sink] kCustomCall
""".splitlines()  # noqa: E501


def test_aliases_and_copies():
    assert aliased_arguments(HLO) == {3, 4} and aliased_arguments("HloModule f\n") == set()
    copies = copies_of(HLO, (512, 16, 8, 128))
    assert [copy.split(" = ")[0] for copy in copies] == ["ROOT %copy.7", "%copy-start.2"]
    assert len(copies_of(HLO, (256, 8, 128))) == 3 and copies_of(HLO, (4096, 16, 8, 128)) == []


def test_names_and_shared_memory(tmp_path):
    assert pallas_names(HLO) == ["kv_write", "paged_attn_fwd"]
    assert thunk_shared_bytes(THUNKS, "paged_attn_fwd") == 39168 and thunk_shared_bytes(THUNKS, "other") == 0
    log = tmp_path / "body_0.mlir-passes.log"
    assert mosaic_shared_bytes(log) == 0
    log.write_text("gpu.launch ... dynamic_shared_memory_size %c100432_i32 {")
    assert mosaic_shared_bytes(log) == 100432


def test_launches():
    ran = launches(THUNKS)
    assert [name for _, name in ran] == [
        *("loop_convert_fusion", "kCopy", "gemm_fusion_dot_1", "paged_attn_fwd", "paged_attn_fwd_1", "kCustomCall")
    ]
    assert per_layer(ran, ran[:3], 1) == {"paged_attn_fwd": 2, "kCustomCall": 1}
