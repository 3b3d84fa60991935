import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { KvError } from "@kv/interface";
import { runCommand } from "@kv/program";
import type { Environment } from "../environment.js";

/** `CUDA_ERROR_NO_DEVICE`, which the real driver returns on a machine without a GPU. */
const NO_DEVICE = 100;
/** The driver functions that NIXL's LIBFABRIC plugin calls. */
const SOURCE = `
int cuInit(unsigned flags) { (void)flags; return ${NO_DEVICE}; }
int cuCtxSetCurrent(void *context) { (void)context; return ${NO_DEVICE}; }
int cuDeviceGetPCIBusId(char *id, int length, int device) { (void)id; (void)length; (void)device; return ${NO_DEVICE}; }
int cuPointerGetAttributes(unsigned count, void *attributes, void **data, unsigned long long pointer) {
  (void)count; (void)attributes; (void)data; (void)pointer; return ${NO_DEVICE};
}
`;

/**
 * Compiles a stub of libcuda.so.1 that reports no device, for machines without NVIDIA's driver: NIXL's LIBFABRIC plugin is linked against
 * that library. `folder` gets the library, `work` the source. Rejects with `KV_INSTALL_FAILED`, such as when there is no C compiler.
 */
export async function compileLibcudaStub(
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
    const { exitCode, how, isFound, stderr } = await runCommand(compiler, args, { env: environment });
    if (!isFound) continue;
    if (exitCode === 0) return;
    const why = stderr.trim().split("\n").at(-1) || how;
    throw new KvError("KV_INSTALL_FAILED", `${compiler} could not compile a stub of libcuda.so.1: ${why}`);
  }
  throw new KvError(
    "KV_INSTALL_FAILED",
    `this machine has no libcuda.so.1, and no C compiler to build a stub (tried ${compilers.join(", ")})`,
    { hint: "install NVIDIA's driver if there is a GPU, otherwise a compiler, such as: apt-get install gcc" },
  );
}
