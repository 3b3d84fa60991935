// libcuda.so.1 for machines without NVIDIA's driver: every call says that there is no device. It
// has what NIXL's LIBFABRIC plugin and cudart.c call. A real driver is always preferred.
enum { kNoDevice = 100 };

int cuInit(unsigned flags) { return (void)flags, kNoDevice; }
int cuCtxSetCurrent(void* context) { return (void)context, kNoDevice; }
int cuDeviceGet(int* device, int ordinal) { return (void)device, (void)ordinal, kNoDevice; }
int cuDevicePrimaryCtxRetain(void** context, int device) { return (void)context, (void)device, kNoDevice; }
int cuDeviceGetPCIBusId(char* id, int length, int device) { return (void)id, (void)length, (void)device, kNoDevice; }
int cuPointerGetAttributes(unsigned count, void* attributes, void** data, unsigned long long pointer) {
  return (void)count, (void)attributes, (void)data, (void)pointer, kNoDevice;
}
int cuGetErrorString(int error, const char** text) {
  *text = error == 0 ? "no error" : "no CUDA-capable device is detected";
  return 0;
}
