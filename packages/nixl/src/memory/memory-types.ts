import type { BackendSpec, MemoryType } from "@kv/interface";
import { backendFacts } from "../backends/backend-traits.js";
import { gpusHere } from "./gpus.js";

/** What agents with these backends can register on this machine. Memory of devices only where there is one. */
export function memoryTypesOf(
  backends: readonly BackendSpec[],
  gpus: () => readonly string[] = gpusHere,
): readonly MemoryType[] {
  const facts = backends.map(({ name }) => backendFacts(name));
  const types: MemoryType[] = ["DRAM"];
  if (facts.some(({ devices }) => devices) && gpus().length > 0) types.push("VRAM");
  if (facts.some(({ files }) => files)) types.push("FILE");
  if (facts.some(({ objects }) => objects)) types.push("OBJ");
  return Object.freeze(types);
}
