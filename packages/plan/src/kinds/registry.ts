import { KvError } from "@kv/interface";
import type { CacheKind } from "./cache-kind.js";
import { circular } from "./circular.js";
import { full } from "./full.js";
import { mamba } from "./mamba.js";
import { mla } from "./mla.js";
import { swa } from "./swa.js";
import { swaMla } from "./swa-mla.js";

const KINDS: ReadonlyMap<string, CacheKind> = new Map(
  [full, mla, swa, swaMla, mamba, circular].map((kind) => [kind.name, kind]),
);

/** Errors: `KV_PLAN_INVALID` for a name that is none of them. */
export function cacheKind(name: string): CacheKind {
  const found = KINDS.get(name);
  if (found !== undefined) return found;
  throw new KvError(
    "KV_PLAN_INVALID",
    `the model: group kind "${name}" is none of ${[...KINDS.keys()].join(", ")}`,
  );
}

export function cacheKindNames(): readonly string[] {
  return [...KINDS.keys()];
}
