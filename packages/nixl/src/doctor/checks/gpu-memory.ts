import { dirname, join } from "node:path";
import { type Environment, realLibrary } from "../../library/find-library.js";
import { type MissingPart, missingParts, nameOfMissing } from "../../library/missing-parts.js";
import { nvidiaGpus } from "../../memory/gpus.js";
import type { Host } from "../host.js";
import type { Check } from "../report.js";

export interface GpuMemoryQuestion {
  readonly host: Host;
  readonly environment: Environment;
  /** Path of `libnixl_capi.so`: the wheel's UCX lies beside it. */
  readonly libraryPath: string;
  /** What a library lacks; the loader is asked by default. */
  readonly missing?: (file: string, options: { environment: Environment }) => Promise<MissingPart[]>;
}

/** Whether UCX reaches the memory of this machine's GPUs: its module for CUDA, what that lacks, and whether `UCX_TLS` allows it. Nothing where there is no GPU. */
export async function gpuMemoryChecks(question: GpuMemoryQuestion): Promise<Check[]> {
  const { host, environment, libraryPath, missing = missingParts } = question;
  const gpus = nvidiaGpus(host.names);
  if (gpus.length === 0) return [];
  const module = cudaModule(host, libraryPath);
  const check = {
    id: "library.gpu-memory",
    area: "library",
    title: "memory of GPUs (VRAM)",
    details: { gpus, module: module ?? null },
  } as const;
  if (module === undefined) {
    return [
      {
        ...check,
        status: "note",
        found: "no module of UCX for CUDA beside the library: not the wheel's UCX",
      },
    ];
  }
  const lacked = await missing(module, { environment });
  if (lacked.length > 0) {
    const found = `UCX's module for CUDA lacks ${lacked.map(nameOfMissing).join(", ")}: host memory alone can be registered`;
    const fix =
      "give the container the driver (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility), or put its folder into LD_LIBRARY_PATH";
    return [{ ...check, status: "warn", found, fix }];
  }
  const transports = environment.UCX_TLS;
  if (transports !== undefined && !allowsCuda(transports)) {
    const found = `UCX_TLS=${transports} leaves CUDA out: host memory alone can be registered`;
    return [{ ...check, status: "warn", found, fix: "add cuda to UCX_TLS, or unset it" }];
  }
  return [{ ...check, status: "ok", found: `UCX's module for CUDA loads; ${gpus.length} NVIDIA` }];
}

function cudaModule(host: Host, libraryPath: string): string | undefined {
  const wheel = dirname(dirname(realLibrary(libraryPath)));
  for (const folder of host.names(wheel).filter((name) => /^nixl_cu\d+\.libs$/.test(name))) {
    const modules = join(wheel, folder, "ucx");
    const file = host.names(modules).find((name) => /^libuct_cuda\.so/.test(name));
    if (file !== undefined) return join(modules, file);
  }
  return undefined;
}

/** As UCX reads it: what is allowed, or after a `^` what is not. `cuda_copy` is what no transfer of device memory goes without. */
function allowsCuda(transports: string): boolean {
  const names = transports.replace(/^\^/, "").split(",");
  const named = names.some((name) => ["cuda", "cuda_copy"].includes(name.trim().replace(/^\\/, "")));
  return transports.startsWith("^") ? !named : named || names.includes("all") || transports.trim() === "";
}
