import type { KvCacheKind } from "@kv/interface";
import type { RankGeometry } from "../geometry.js";
import type { RequestBlocks } from "../request-plan-types.js";
import { fail } from "./verdict.js";

/** What one group of a request asks for, read from the request alone: which token stands where on either side. */
export interface GroupDemand {
  readonly group: number;
  readonly kind: KvCacheKind;
  /** Kernel blocks to fill, and the position of each in `localBlocks`. */
  readonly localBlocks: readonly number[];
  readonly localPosition: ReadonlyMap<number, number>;
  /** Token of the sequence at the begin of the first local block. */
  readonly localBegin: number;
  /** The same of the remote's blocks. */
  readonly remotePosition: ReadonlyMap<number, number>;
  readonly remoteBegin: number;
  /** Tokens from here on are not part of the request. */
  readonly endToken: number;
}

export function demandOf(
  group: number,
  kind: KvCacheKind,
  local: RankGeometry,
  remote: RankGeometry,
  blocks: RequestBlocks,
): GroupDemand {
  const localIds = blocks.localBlockIds[group] ?? [];
  const remoteIds = blocks.remoteBlockIds[group] ?? [];
  const localTokens = local.kernelBlockSize * local.physicalBlocksPerLogical;
  const remoteTokens = remote.kernelBlockSize * remote.physicalBlocksPerLogical;
  const { numTokens } = blocks;
  // A window's list ends where the sequence does; any other begins with it.
  const windowed = kind === "swa";
  const ends = (tokens: number) => Math.ceil((numTokens as number) / tokens) * tokens;
  const remoteBegin =
    windowed && numTokens !== undefined ? ends(remoteTokens) - remoteIds.length * remoteTokens : 0;
  const computed = windowed ? undefined : blocks.localComputedBlocks?.[group];
  let localBegin: number;
  if (computed !== undefined) localBegin = computed * localTokens;
  else if (numTokens !== undefined) localBegin = ends(localTokens) - localIds.length * localTokens;
  else if (localTokens === remoteTokens) localBegin = (remoteIds.length - localIds.length) * localTokens;
  else localBegin = 0;
  const localBlocks = kernelBlocks(localIds, local.physicalBlocksPerLogical);
  return {
    group,
    kind,
    localBlocks,
    localPosition: positions(`group ${group}: local`, localBlocks),
    localBegin,
    remotePosition: positions(
      `group ${group}: remote`,
      kernelBlocks(remoteIds, remote.physicalBlocksPerLogical),
    ),
    remoteBegin,
    endToken: Math.min(numTokens ?? Number.POSITIVE_INFINITY, remoteBegin + remoteIds.length * remoteTokens),
  };
}

function kernelBlocks(logical: readonly number[], perLogical: number): readonly number[] {
  if (perLogical === 1) return logical;
  return logical.flatMap((id) => Array.from({ length: perLogical }, (_, part) => id * perLogical + part));
}

function positions(what: string, blocks: readonly number[]): ReadonlyMap<number, number> {
  const found = new Map<number, number>();
  for (const [position, block] of blocks.entries()) {
    const before = found.get(block);
    if (before !== undefined)
      fail("request-tables", `${what} kernel block ${block} is listed twice`, { block, before, position });
    found.set(block, position);
  }
  return found;
}
