import { dirname, join } from "node:path";
import type { Environment } from "../../environment.js";
import type { Host } from "../../host.js";
import { realLibrary } from "../../library/cache-folder.js";
import { missingParts, nameOfMissing } from "../../library/missing-parts.js";
import { nvidiaGpus } from "../../memory/memory-types.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

export interface GpuMemoryOptions {
  readonly host: Host;
  readonly environment: Environment;
  /** Path of `libnixl_capi.so`. The wheel's UCX lies beside it. */
  readonly libraryPath: string;
  readonly missing?: typeof missingParts | undefined;
}

/**
 * Checks whether UCX can register memory of this machine's GPUs, and copies it by CUDA IPC. Empty
 * without a GPU.
 */
export async function gpuMemoryChecks(options: GpuMemoryOptions): Promise<Check[]> {
  const { host, environment, libraryPath, missing = missingParts } = options;
  const gpus = nvidiaGpus(host.names);
  if (gpus.length === 0) return [];
  const module = cudaModule(host, libraryPath);
  const details = { gpus, module: module ?? null };
  const check = finding("library", "gpu-memory", "memory of GPUs (VRAM)", details);
  if (module === undefined)
    return [
      check(
        "note",
        "there is no CUDA module of UCX beside the library, which is not from the wheel",
      ),
    ];
  const lacked = await missing(module, { environment });
  if (lacked.length > 0) {
    const found = `UCX's CUDA module lacks ${lacked.map(nameOfMissing).join(", ")}: only host memory can be registered`;
    return [check("warn", found, GIVE_DRIVER)];
  }
  const transports = environment.UCX_TLS;
  if (!allows(transports, "cuda_copy")) {
    const found = `UCX_TLS=${transports} excludes CUDA: only host memory can be registered`;
    return [check("warn", found, ALLOW_CUDA)];
  }
  if (!allows(transports, "cuda_ipc")) {
    const found = `UCX_TLS=${transports} excludes CUDA IPC: bytes between processes of this host go through host memory`;
    return [check("warn", found, ALLOW_CUDA)];
  }
  return [check("ok", `UCX's CUDA module loads; ${gpus.length} NVIDIA`)];
}

const GIVE_DRIVER =
  "give the container the driver (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility), or add its folder to LD_LIBRARY_PATH";
const ALLOW_CUDA = "add cuda to UCX_TLS, or unset it";

function cudaModule(host: Host, libraryPath: string): string | undefined {
  const wheel = dirname(dirname(realLibrary(libraryPath)));
  for (const folder of host.names(wheel).filter((name) => /^nixl_cu\d+\.libs$/.test(name))) {
    const modules = join(wheel, folder, "ucx");
    const file = host.names(modules).find((name) => /^libuct_cuda\.so/.test(name));
    if (file !== undefined) return join(modules, file);
  }
  return undefined;
}

/**
 * `UCX_TLS` lists the allowed transports, or after a `^` the excluded ones; `cuda` names all of
 * CUDA. Every transfer of device memory needs `cuda_copy`.
 */
function allows(transports: string | undefined, transport: "cuda_copy" | "cuda_ipc"): boolean {
  if (transports === undefined) return true;
  const names = transports.replace(/^\^/, "").split(",");
  const named = names.some((name) => ["cuda", transport].includes(name.trim().replace(/^\\/, "")));
  return transports.startsWith("^")
    ? !named
    : named || names.includes("all") || transports.trim() === "";
}
