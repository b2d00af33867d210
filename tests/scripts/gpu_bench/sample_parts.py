"""Parts for `bench_gpu.py` that break in every way that a kernel can; they need no JAX, so start at once."""

import ctypes
import os
import signal
import time


def rows(task):
    match task.part:
        case "device":
            yield {"platform": "gpu", "implementations": {"good": None, "deadly": None, "not for it": "too old"}}
        case "numerics" if task.group == "deadly":
            yield {"case": "before", "ok": True}
            print("not a row: something of a library's")
            os.kill(os.getpid(), signal.SIGKILL)
        case "ceilings":
            yield {"ceiling": "memory read", "bytes_per_s": 5.0}
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        case "attention" if task.group == "deadly":
            ctypes.string_at(0)
        case "writes":
            os._exit(3)
        case "uploads":
            yield {"upload": "first", "seconds": 1.0}
            hang()
        case _:
            yield {"of": f"{task.part} {task.group}".strip(), "ceilings": dict(task.ceilings)}


def hang():
    time.sleep(1000)
