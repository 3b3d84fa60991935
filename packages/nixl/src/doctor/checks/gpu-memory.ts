import { dirname, join } from "node:path";
import { runCommand } from "@kv/program";
import type { Environment } from "../../environment.js";
import type { Host } from "../../host.js";
import { realLibrary } from "../../library/cache-folder.js";
import { missingParts, nameOfMissing } from "../../library/missing-parts.js";
import { nvidiaGpus } from "../../memory/memory-types.js";
import type { Check } from "../../reports.js";
import { finding } from "./finding.js";

/**
 * UCX's switch for READ by CUDA IPC, and its values for yes (UCX 1.23, `ucs_config_sscanf_on_off`).
 * The addon sets "on" by default.
 */
const READ_BY_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY";
const ON = /^(on|yes|y|1)$/i;

export interface GpuMemoryOptions {
  readonly host: Host;
  readonly environment: Environment;
  /** Path of `libnixl_capi.so`. The wheel's UCX lies beside it. */
  readonly libraryPath: string;
  readonly missing?: typeof missingParts | undefined;
  /** Active NVLinks, undefined when unknown; asks `nvidia-smi` by default. */
  readonly nvlinks?: (() => Promise<number | undefined>) | undefined;
}

/**
 * Checks whether UCX can register memory of this machine's GPUs, and how it reads that of another
 * process. Empty without a GPU.
 */
export async function gpuMemoryChecks(options: GpuMemoryOptions): Promise<Check[]> {
  const {
    host,
    environment,
    libraryPath,
    missing = missingParts,
    nvlinks = activeNvlinks,
  } = options;
  const gpus = nvidiaGpus(host.names);
  if (gpus.length === 0) return [];
  const module = cudaModule(host, libraryPath);
  const check = finding("library", "gpu-memory", "memory of GPUs (VRAM)");
  const details = { gpus, module: module ?? null };
  if (module === undefined) {
    const found = "there is no CUDA module of UCX beside the library, which is not from the wheel";
    return [check("note", found, { details })];
  }
  const lacked = await missing(module, { environment });
  if (lacked.length > 0) {
    const found = `UCX's CUDA module lacks ${lacked.map(nameOfMissing).join(", ")}: only host memory can be registered`;
    const fix =
      "give the container the driver (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility), or add its folder to LD_LIBRARY_PATH";
    return [check("warn", found, { fix, details })];
  }
  const transports = environment.UCX_TLS;
  if (!allows(transports, "cuda_copy")) {
    const found = `UCX_TLS=${transports} excludes CUDA: only host memory can be registered`;
    return [check("warn", found, { fix: "add cuda to UCX_TLS, or unset it", details })];
  }
  return [
    check("ok", `UCX's CUDA module loads; ${gpus.length} NVIDIA`, { details }),
    readCheck(environment, await nvlinks()),
  ];
}

/**
 * Without NVLinks UCX reads GPU memory of another process by CUDA IPC only when told to, else by
 * host memory and TCP (UCX 1.23, `uct_cuda_ipc_iface_get_max_get_zcopy`). On an H200 without
 * NVLinks READ had 0.1 GB/s, and WRITE 100.
 */
function readCheck(environment: Environment, links: number | undefined): Check {
  const value = environment[READ_BY_IPC] ?? "on";
  const check = finding("library", "gpu-reads", "READ from memory of GPUs");
  const details = { [READ_BY_IPC]: value, nvlinks: links ?? null };
  if (!allows(environment.UCX_TLS, "cuda_ipc")) {
    const found = `UCX_TLS=${environment.UCX_TLS} excludes CUDA IPC: bytes between processes of this host go through host memory`;
    return check("warn", found, { fix: "add cuda to UCX_TLS, or unset it", details });
  }
  if (ON.test(value)) return check("ok", `by CUDA IPC: ${READ_BY_IPC}=${value}`, { details });
  if (links !== undefined && links > 0)
    return check("ok", `by CUDA IPC; ${links} active NVLinks`, { details });
  const found = `${links === 0 ? "there are no active NVLinks: " : "without NVLinks "}UCX reads from a process of this host through TCP, about 1,000 times slower than WRITE`;
  const fix = `unset ${READ_BY_IPC} in the process that reads`;
  return check(links === 0 ? "warn" : "note", found, { fix, details });
}

/** `nvidia-smi nvlink` lists nothing for a GPU without links. */
async function activeNvlinks(): Promise<number | undefined> {
  const { exitCode, stdout } = await runCommand("nvidia-smi", ["nvlink", "-s"], {
    timeoutMs: 10_000,
  });
  return exitCode === 0 ? (stdout.match(/Link \d+: [\d.]+ GB\/s/g)?.length ?? 0) : undefined;
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
