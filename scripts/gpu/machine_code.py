"""What compilers say about GPU machine code, as data: ptxas -v's report, and nvdisasm's listing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class PtxasReport:
    """What `ptxas -v` tells of one entry function. Bytes are a thread's, shared memory a block's."""

    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    shared_bytes: int = 0
    serialised: bool = False  # its wgmma wait for one another, since their registers are touched in between

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


def parse_ptxas(text: str) -> dict[str, PtxasReport]:
    """The reports in ptxas's standard error, by entry function. Shared memory is what is declared statically."""
    reports: dict[str, PtxasReport] = {}
    current = PtxasReport()
    serialised = re.findall(r"wgmma.mma_async instructions are serialized .* in the function '([^']+)'", text)
    for line in text.splitlines():
        if entry := re.search(r"Compiling entry function '([^']+)'", line):
            current = reports.setdefault(entry[1], PtxasReport(serialised=entry[1] in serialised))
        elif properties := re.search(r"Function properties for (\S+)", line):
            # Of a function that an entry calls: its frame counts for nobody here.
            current = reports.get(properties[1], PtxasReport())
        if spill := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            current.stack_bytes, current.spill_store_bytes, current.spill_load_bytes = map(int, spill.groups())
        if used := re.search(r"Used (\d+) registers", line):
            current.registers = int(used[1])
        if shared := re.search(r"(\d+) bytes smem", line):
            current.shared_bytes = int(shared[1])
    return reports


@dataclass(frozen=True)
class Instruction:
    """An instruction of a listing: its class, such as "LDG.128", see `class_of`, and where it may jump to."""

    kind: str
    jumps_to: str = ""


@dataclass(frozen=True)
class MachineCode:
    """The listing of one function."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # index of the instruction that a label stands before

    def histogram(self) -> dict[str, int]:
        """How many instructions there are of each class, and "total"."""
        counts = Counter(i.kind for i in self.instructions)
        return {**{kind: counts[kind] for kind in CLASSES if counts[kind]}, "total": len(self.instructions)}

    def loops(self) -> Iterator[dict[str, int]]:
        """Of each innermost loop, how many instructions of each class it has.

        A loop is what lies between a label and a later jump back to it. ptxas ends functions with a jump to itself,
        which is none.
        """
        spans = [
            (self.labels[instruction.jumps_to], end)
            for end, instruction in enumerate(self.instructions)
            if instruction.jumps_to in self.labels and self.labels[instruction.jumps_to] < end
        ]
        for start, end in spans:
            if not any((start <= s and e <= end) for s, e in spans if (s, e) != (start, end)):
                counts = Counter(i.kind for i in self.instructions[start : end + 1])
                yield {kind: counts[kind] for kind in CLASSES if counts[kind]}


# Tensor cores (Hopper's wgmma, mma, Blackwell's tcgen05), bulk copies, copies that bypass registers by the bytes each
# thread moves, loads and stores of global memory by bits a thread, local memory, shared memory, special functions.
CLASSES = (
    *("HGMMA", "HMMA", "IMMA", "QGMMA", "UTCMMA", "UTMALDG", "UTMASTG", "UBLKCP"),
    *("LDGSTS.128", "LDGSTS.64", "LDGSTS.32", "LDG.256", "LDG.128", "LDG.64", "LDG.32", "LDG.16", "LDG.8"),
    *("STG.256", "STG.128", "STG.64", "STG.32", "STG.16", "STG.8", "LDL", "STL"),
    *("LDSM", "STSM", "LDS", "STS", "MUFU", "BAR", "SYNCS", "ATOM", "RED", "SHFL", "other"),
)
_BY_NAME = frozenset(c for c in CLASSES if "." not in c and c != "other")
_WIDTHS = {"256": "256", "128": "128", "64": "64", "U16": "16", "S16": "16", "U8": "8", "S8": "8"}


def class_of(opcode: str) -> str:
    """One of `CLASSES`: "LDG.E.128.CONSTANT" is "LDG.128", "LDG.E.U16" is "LDG.16", "LDGSTS.E" is "LDGSTS.32"."""
    name, *modifiers = opcode.split(".")
    if name in ("LDG", "STG", "LDGSTS"):
        return f"{name}.{next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), '32')}"
    if re.fullmatch(r"UTC\w*MMA", name):
        return "UTCMMA"
    return name if name in _BY_NAME else "other"


def parse_listing(text: str) -> dict[str, MachineCode]:
    """The functions in what `nvdisasm -c` prints, by name."""
    functions: dict[str, MachineCode] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    name = ""

    def finish() -> None:
        if name and instructions:
            functions[name] = MachineCode(tuple(instructions), dict(labels))
        instructions.clear()
        labels.clear()

    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+(\S+?),", line):
            finish()
            name = section[1].removeprefix(".text.") if section[1].startswith(".text.") else ""
        elif label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            jump = re.search(r"`\((\.L_x_\d+)\)", code[2]) if code[1].startswith("BRA") else None
            instructions.append(Instruction(class_of(code[1]), jump[1] if jump else ""))
    finish()
    return functions
