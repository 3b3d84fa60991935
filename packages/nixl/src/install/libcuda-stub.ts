import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import type { Environment } from "../library/find-library.js";
import { run } from "./pip.js";

/** CUDA_ERROR_NO_DEVICE: what the driver's own library answers on a machine without a GPU. */
const NO_DEVICE = 100;
/** The functions of the driver that NIXL's plugin calls. */
const SOURCE = `
int cuInit(unsigned flags) { (void)flags; return ${NO_DEVICE}; }
int cuCtxSetCurrent(void *context) { (void)context; return ${NO_DEVICE}; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { (void)id; (void)length; (void)device; return ${NO_DEVICE}; }
int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer) {
  (void)count; (void)attributes; (void)data; (void)pointer; return ${NO_DEVICE};
}
`;

/**
 * Compiles a libcuda.so.1 that knows no device, for a machine without NVIDIA's driver: NIXL's plugin of LIBFABRIC is linked to
 * that library even where there is no GPU. Errors: `KV_INSTALL_FAILED` where there is no C compiler.
 */
export async function compileLibcudaStandIn(
  folder: string,
  work: string,
  environment: Environment,
): Promise<void> {
  const source = join(work, "cuda.c");
  await writeFile(source, SOURCE);
  const args = [
    "-shared",
    "-fPIC",
    "-O1",
    "-Wl,-soname,libcuda.so.1",
    "-o",
    join(folder, "libcuda.so.1"),
    source,
  ];
  const compilers = environment.CC ? [environment.CC] : ["cc", "gcc", "clang"];
  for (const compiler of compilers) {
    const { status, lines } = await run(compiler, args, environment, () => {});
    if (status === undefined) continue;
    if (status === 0) return;
    throw new KvError(
      "KV_INSTALL_FAILED",
      `${compiler} could not compile a stand-in for libcuda.so.1: ${lines.at(-1)}`,
    );
  }
  throw new KvError(
    "KV_INSTALL_FAILED",
    `this machine has no libcuda.so.1, and no C compiler to make a stand-in (tried ${compilers.join(", ")})`,
    { hint: "install NVIDIA's driver where there is a GPU; else a compiler, such as: apt-get install gcc" },
  );
}
