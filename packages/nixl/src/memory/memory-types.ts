import { readdirSync } from "node:fs";
import type { BackendSpec, MemoryType } from "@kv/interface";
import { backendTraits } from "../backends/backend-traits.js";

/** What agents with these backends can register on this machine. `VRAM` needs an NVIDIA GPU. */
export function memoryTypesOf(
  backends: readonly BackendSpec[],
  gpus: () => readonly string[] = nvidiaGpus,
): readonly MemoryType[] {
  const traits = backends.map(({ name }) => backendTraits(name));
  const types: MemoryType[] = ["DRAM"];
  if (traits.some(({ devices }) => devices) && gpus().length > 0) types.push("VRAM");
  if (traits.some(({ files }) => files)) types.push("FILE");
  if (traits.some(({ objects }) => objects)) types.push("OBJ");
  return Object.freeze(types);
}

/** GPUs that this process may use, such as `nvidia0`, by the driver's device files. */
export function nvidiaGpus(
  list: (folder: string) => readonly string[] = readdirSync,
): readonly string[] {
  try {
    return list("/dev").filter((name) => /^nvidia\d+$/.test(name));
  } catch {
    return [];
  }
}
