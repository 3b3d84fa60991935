import { readdirSync } from "node:fs";

/** NVIDIA's GPUs that a process may use, by the driver's files; `names` lists a folder. */
export const nvidiaGpus = (names: (folder: string) => readonly string[]): readonly string[] =>
  names("/dev").filter((name) => /^nvidia\d+$/.test(name));

/** Those of this process. */
export function gpusHere(): readonly string[] {
  try {
    return nvidiaGpus(readdirSync);
  } catch {
    return [];
  }
}
