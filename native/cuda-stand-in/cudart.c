// libcudart.so.12 for machines without the CUDA runtime: the two functions that NIXL's LIBFABRIC
// plugin calls, made of the driver's. The runtime and the driver number errors alike.
int cuInit(unsigned flags);
int cuCtxSetCurrent(void* context);
int cuDeviceGet(int* device, int ordinal);
int cuDevicePrimaryCtxRetain(void** context, int device);
int cuGetErrorString(int error, const char** text);

int cudaSetDevice(int ordinal) {
  int device = 0;
  void* context = 0;
  int error = cuInit(0);
  if (error == 0) error = cuDeviceGet(&device, ordinal);
  if (error == 0) error = cuDevicePrimaryCtxRetain(&context, device);
  if (error == 0) error = cuCtxSetCurrent(context);
  return error;
}

const char* cudaGetErrorString(int error) {
  const char* text = "unknown error";
  cuGetErrorString(error, &text);
  return text;
}
