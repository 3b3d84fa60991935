import { KvError } from "@kv/interface";
import { formatValue, requireObject } from "../validate.js";

/** A question to a storage backend; see `NixlAgent.queryMemory`. */
export interface MemoryQuery {
  /** Name of a backend of the agent, such as "POSIX". */
  readonly backend: string;
  /** `FILE` for paths, `OBJ` for keys of objects. */
  readonly memoryType: "FILE" | "OBJ";
  /** Paths or keys, 1,024 at most, each of 1 to 4,096 bytes without NUL. */
  readonly keys: readonly string[];
}

const MAX_KEYS = 1024;
const MAX_KEY_BYTES = 4096;

/** Throws `KV_MEMORY_INVALID` for a query that the addon cannot take. */
export function requireQuery(query: MemoryQuery): void {
  requireObject(query, "KV_MEMORY_INVALID", "a query");
  const { memoryType, keys } = query;
  const invalid = (what: string) => new KvError("KV_MEMORY_INVALID", `the query is wrong: ${what}`);
  if (memoryType !== "FILE" && memoryType !== "OBJ") {
    throw invalid(`memoryType is ${formatValue(memoryType)}, not FILE or OBJ`);
  }
  if (!Array.isArray(keys) || keys.length === 0 || keys.length > MAX_KEYS) {
    throw invalid(`keys is ${formatValue(keys)}, not a list of 1 to ${MAX_KEYS} keys`);
  }
  for (const key of keys as readonly unknown[]) {
    if (
      typeof key === "string" &&
      key !== "" &&
      !key.includes("\0") &&
      Buffer.byteLength(key) <= MAX_KEY_BYTES
    )
      continue;
    throw invalid(`${formatValue(key)} is not a key of 1 to ${MAX_KEY_BYTES} bytes without NUL`);
  }
}
