import { dirname, join } from "node:path";
import { runCommand } from "@kv/program";
import type { Environment } from "../../environment.js";
import { realLibrary } from "../../library/cache-folder.js";
import { type MissingPart, missingParts, nameOfMissing } from "../../library/missing-parts.js";
import { nvidiaGpus } from "../../memory/memory-types.js";
import type { Host } from "../host.js";
import type { Check } from "../report.js";

/**
 * UCX's switch for READ by CUDA IPC, and its values that mean yes (UCX 1.23,
 * `ucs_config_sscanf_on_off`). The addon sets "on" where it is not set.
 */
const READ_BY_IPC = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY";
const ON = /^(on|yes|y|1)$/i;

/** Options of `gpuMemoryChecks`. */
export interface GpuMemoryOptions {
  /** The machine. */
  readonly host: Host;
  /** The variables that apply. */
  readonly environment: Environment;
  /** Path of `libnixl_capi.so`. The wheel's UCX lies beside it. */
  readonly libraryPath: string;
  /** Returns what a library lacks; `missingParts` by default. */
  readonly missing?:
    | ((file: string, options: { environment: Environment }) => Promise<MissingPart[]>)
    | undefined;
  /**
   * The number of active NVLinks of the GPUs, undefined when nobody can tell; asks `nvidia-smi` by
   * default.
   */
  readonly nvlinks?: (() => Promise<number | undefined>) | undefined;
}

/**
 * Whether UCX can register memory of this machine's GPUs: its CUDA module is there and loads, and
 * `UCX_TLS` allows it; and how it reads GPU memory of another process. Empty when there is no GPU.
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
        found: "there is no CUDA module of UCX beside the library, which is not from the wheel",
      },
    ];
  }
  const lacked = await missing(module, { environment });
  if (lacked.length > 0) {
    const found = `UCX's CUDA module lacks ${lacked.map(nameOfMissing).join(", ")}: only host memory can be registered`;
    const fix =
      "give the container the driver (docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility), or add its folder to LD_LIBRARY_PATH";
    return [{ ...check, status: "warn", found, fix }];
  }
  const transports = environment.UCX_TLS;
  if (!allows(transports, "cuda_copy")) {
    const found = `UCX_TLS=${transports} excludes CUDA: only host memory can be registered`;
    return [{ ...check, status: "warn", found, fix: "add cuda to UCX_TLS, or unset it" }];
  }
  return [
    { ...check, status: "ok", found: `UCX's CUDA module loads; ${gpus.length} NVIDIA` },
    readCheck(environment, await nvlinks()),
  ];
}

/**
 * How UCX reads GPU memory of another process of this host. Without NVLinks it does so by CUDA IPC
 * only where it is told to, as the addon does; its way around goes through host memory and TCP (UCX
 * 1.23, `uct_cuda_ipc_iface_get_max_get_zcopy`). On an H200 without NVLinks READ had 0.1 GB/s, and
 * WRITE 100.
 */
function readCheck(environment: Environment, links: number | undefined): Check {
  const value = environment[READ_BY_IPC] ?? "on";
  const check = {
    id: "library.gpu-reads",
    area: "library",
    title: "READ from memory of GPUs",
    details: { [READ_BY_IPC]: value, nvlinks: links ?? null },
  } as const;
  if (!allows(environment.UCX_TLS, "cuda_ipc")) {
    const found = `UCX_TLS=${environment.UCX_TLS} excludes CUDA IPC: bytes between processes of this host go through host memory`;
    return { ...check, status: "warn", found, fix: "add cuda to UCX_TLS, or unset it" };
  }
  if (ON.test(value))
    return { ...check, status: "ok", found: `by CUDA IPC: ${READ_BY_IPC}=${value}` };
  if (links !== undefined && links > 0) {
    return { ...check, status: "ok", found: `by CUDA IPC; ${links} active NVLinks` };
  }
  const found = `${links === 0 ? "there are no active NVLinks: " : "without NVLinks "}UCX reads from a process of this host through TCP, about 1,000 times slower than WRITE`;
  const fix = `unset ${READ_BY_IPC} in the process that reads`;
  return { ...check, status: links === 0 ? "warn" : "note", found, fix };
}

/** Counts the active links that `nvidia-smi nvlink` lists; it lists none for a GPU without them. */
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
 * Whether `UCX_TLS` allows a transport, which `cuda` names as well: it lists the allowed ones, or
 * after a `^` the excluded ones. Every transfer of device memory needs `cuda_copy`.
 */
function allows(transports: string | undefined, transport: "cuda_copy" | "cuda_ipc"): boolean {
  if (transports === undefined) return true;
  const names = transports.replace(/^\^/, "").split(",");
  const named = names.some((name) => ["cuda", transport].includes(name.trim().replace(/^\\/, "")));
  return transports.startsWith("^")
    ? !named
    : named || names.includes("all") || transports.trim() === "";
}
