"""Memory of a GPU by CUDA's driver and ctypes."""

import ctypes
import os
import sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p


def checked(what, status):
    if status != 0:
        sys.exit(f"{what} answered {status}")


class CudaMemory:
    def __init__(self, ordinal, length):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.length = length
        device, context, pointer = c_int(), c_void_p(), c_uint64()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemAlloc_v2", byref(pointer), c_size_t(length))
        self.address = pointer.value

    def call(self, name, *arguments):
        checked(name, getattr(self.driver, name)(*arguments))

    def write(self, data):
        self.call("cuMemcpyHtoD_v2", c_uint64(self.address), data, c_size_t(self.length))

    def read(self):
        data = ctypes.create_string_buffer(self.length)
        self.call("cuMemcpyDtoH_v2", data, c_uint64(self.address), c_size_t(self.length))
        return data.raw


class TorchMemory:
    """Memory of PyTorch's allocator, as in vLLM. Expandable segments are mapped, not allocated: no CUDA IPC handle opens them."""

    def __init__(self, ordinal, length, expandable):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{expandable}"
        import torch

        self.torch = torch
        self.bytes = torch.empty(length, dtype=torch.uint8, device=f"cuda:{ordinal}")
        self.address = self.bytes.data_ptr()

    def write(self, data):
        self.bytes.copy_(self.torch.frombuffer(bytearray(data), dtype=self.torch.uint8))
        self.torch.cuda.synchronize()

    def read(self):
        return self.bytes.cpu().numpy().tobytes()
