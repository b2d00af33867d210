"""What ptxas and nvdisasm print, read back: on pieces of their output for real kernels."""

import pytest

from scripts.gpu.machine_code import CLASSES, class_of, parse_listing, parse_ptxas

# Two kernels in one file. The first spills; the second calls a function, whose frame is not its own.
PTXAS = """\
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions defining accumulator registers of a wgmma between start and end of the pipeline stage in the function \
'paged_attn_fwd'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_attn_fwd' for 'sm_90a'
ptxas info    : Function properties for paged_attn_fwd
    72 bytes stack frame, 72 bytes spill stores, 76 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 72 bytes cumulative stack size
ptxas info    : Compile time = 2048.705 ms
ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for body_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
ptxas info    : Function properties for __internal_helper
    64 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""

LISTING = """\
	.target	sm_90a

//--------------------- .text.kv_write            --------------------------
	.section	.text.kv_write,"ax",@progbits
	.align	128
        .size           kv_write,(.L_x_1 - kv_write)
kv_write:
.text.kv_write:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0060*/                   LDG.E R0, desc[UR4][R2.64] ;
        /*0080*/              @!P0 EXIT ;
        /*0130*/                   LDG.E.128 R4, desc[UR4][R4.64] ;
        /*0190*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*01d0*/                   EXIT ;
.L_x_0:
        /*01e0*/                   BRA `(.L_x_0);
        /*01f0*/                   NOP;
.L_x_1:

//--------------------- .text.attend --------------------------
	.section	.text.attend,"ax",@progbits
attend:
.text.attend:
        /*0000*/                   LDG.E.CONSTANT R0, desc[UR4][R2.64] ;
.L_x_2:
        /*0010*/              @!P0 BRA `(.L_x_4) ;
.L_x_3:
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0030*/             @!UP1 UTMALDG.2D [UR8], [UR4], desc[UR6] ;
        /*0040*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR4][R4.64], P1 ;
        /*0050*/               @P0 BRA `(.L_x_3) ;
        /*0060*/                   LDG.E.U16.CONSTANT R0, desc[UR4][R2.64] ;
        /*0070*/               @P1 BRA `(.L_x_2) ;
.L_x_4:
        /*0080*/                   STL [R1+0x8], R3 ;
        /*0090*/                   EXIT ;

	.section	.nv.constant0.attend,"a",@progbits
"""


def test_ptxas_report():
    reports = parse_ptxas(PTXAS)
    assert list(reports) == ["paged_attn_fwd", "body_mosaic_gpu_kernel"]
    first, second = reports.values()
    assert (first.registers, first.stack_bytes, first.spill_store_bytes, first.spill_load_bytes) == (255, 72, 72, 76)
    assert first.spill_bytes == 148 and first.shared_bytes == 0 and first.serialised
    assert (second.registers, second.spill_bytes, second.shared_bytes) == (168, 0, 1024) and not second.serialised


def test_instructions_are_counted_by_class():
    codes = parse_listing(LISTING)
    assert list(codes) == ["kv_write", "attend"]
    assert codes["kv_write"].histogram() == {"LDG.128": 1, "LDG.32": 1, "STG.128": 1, "other": 5, "total": 8}
    attend = codes["attend"].histogram()
    assert attend == {
        **{"HGMMA": 1, "UTMALDG": 1, "LDGSTS.128": 1, "LDG.32": 1, "LDG.16": 1, "STL": 1, "other": 4},
        "total": 10,
    }


def test_innermost_loops():
    codes = parse_listing(LISTING)
    # The outer loop, from .L_x_2, holds another; the jump to itself that ends a function is no loop.
    assert list(codes["attend"].loops()) == [{"HGMMA": 1, "UTMALDG": 1, "LDGSTS.128": 1, "other": 1}]
    assert list(codes["kv_write"].loops()) == []


@pytest.mark.parametrize(
    "opcode, kind",
    [
        ("LDG.E", "LDG.32"),
        ("LDG.E.64.CONSTANT", "LDG.64"),
        ("LDG.E.S8", "LDG.8"),
        ("LDG.E.ENL2.256", "LDG.256"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS.128"),
        ("LDGSTS.E.LTC128B", "LDGSTS.32"),
        ("STG.E.U16", "STG.16"),
        ("LDSM.16.MT88.4", "LDSM"),
        ("LDS.128", "LDS"),
        ("STSM.16.M88.4", "STSM"),
        ("HMMA.16816.F32.BF16", "HMMA"),
        ("UTCHMMA", "UTCMMA"),
        ("UTCQMMA.2CTA", "UTCMMA"),
        ("UTCBAR", "other"),
        ("BAR.SYNC.DEFER_BLOCKING", "BAR"),
        ("REDUX.SUM", "other"),
        ("RED.E.ADD", "RED"),
        ("LDLC", "other"),
        ("IMAD", "other"),
    ],
)
def test_classes(opcode, kind):
    assert kind in CLASSES and class_of(opcode) == kind
