"""Memory of a GPU by CUDA's driver and ctypes."""

import ctypes
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
