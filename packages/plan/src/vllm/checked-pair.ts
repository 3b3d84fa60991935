import type { RankGeometry } from "../geometry/rank-geometry.js";

/** One engine of a pair, as the other side's vLLM sees it in a handshake. */
export interface CheckedSide {
  /** Tensor-parallel size. */
  readonly tpSize: number;
  /** Decode-context-parallel size. */
  readonly dcpSize: number;
  /** Prefill-context-parallel size. @default 1 */
  readonly pcpSize?: number | undefined;
  /** Pipeline stages; the checking vLLM knows only its own. @default 1 */
  readonly ppSize?: number | undefined;
  /** Tokens in a kernel block. */
  readonly blockSize: number;
  /** Kernel blocks in a logical block. */
  readonly kernelsPerLogical: number;
  /** vLLM's name of the layout, such as "LBHNC". */
  readonly layout: string;
  /** vLLM's name of the attention backend. */
  readonly attentionBackend: string;
  /** Bytes of a kernel block, per region. */
  readonly blockLengthsBytes: readonly number[];
  /** Bytes from one kernel block to the next, per region. */
  readonly blockStridesBytes: readonly number[];
  /** Name of the cache in each region; undefined where the handshake has none. */
  readonly regionNames: readonly string[] | undefined;
  /** KV cache group of each region; -1 where groups share it. */
  readonly regionGroupIds: readonly number[];
  /** Memory of each region: "DRAM" or "VRAM". */
  readonly memoryTypes: readonly string[];
  /** Per cache that lies in a row with others: offset and length in bytes. @default none */
  readonly packedMembers?: Readonly<Record<string, readonly number[]>> | undefined;
  /** Bytes of a replicated state (vLLM: `ple_block_len`). @default null, the model has none */
  readonly pleBlockLengthBytes?: number | null | undefined;
  /** vLLM's `engine_id`. @default unknown, and not that of the other */
  readonly engineId?: string | undefined;
}

/** What a request asks of a pair, in kernel blocks of each side. Known only when it runs. */
export interface CheckedRequest {
  /** Blocks that decode has allocated, per KV cache group. */
  readonly decodeBlocks: readonly number[];
  /** Blocks that prefill names, per KV cache group. */
  readonly prefillBlocks: readonly number[];
  /** `remote_num_tokens` of the request; null where the router did not pass it on. */
  readonly numTokens: number | null;
}

/** A pair as vLLM's connector looks at it. */
export interface CheckedPair {
  /** The vLLM that checks: the reader in pull; both sides in push. */
  readonly local: CheckedSide;
  /** The engine that is checked. */
  readonly remote: CheckedSide;
  /** KV heads of the model. */
  readonly numKvHeads: number;
  /** The model's attention is MLA. */
  readonly isMla: boolean;
  /** The model has recurrent states. */
  readonly hasStates: boolean;
  /** The model has circular buffers (vLLM: CSA-linear). @default false */
  readonly isCsaLinear?: boolean | undefined;
  /** Type of the cache, as vLLM names it. */
  readonly cacheDtype: string;
  /** P writes. */
  readonly isPush: boolean;
  /** The checking vLLM is a P that writes. @default false */
  readonly writes?: boolean | undefined;
  /** The checking vLLM caches prefixes. */
  readonly prefixCaching: boolean;
  /**
   * The checking vLLM stages in host memory (`kv_buffer_device` of another kind than the device).
   */
  readonly usesHostBuffer: boolean;
  /** `enable_permute_local_kv` at the checking vLLM. */
  readonly permutes: boolean;
  /** The model needs the hybrid cache manager: it has several kinds of layers. */
  readonly needsHma: boolean;
  /** KV heads of a draft model under MLA, whose cache is the last region; null without one. */
  readonly draftKvHeads: number | null;
  /** The request. @default none: only what every request of the pair meets is checked */
  readonly request?: CheckedRequest | undefined;
}

/** A pair that has a plan, and that vLLM cannot serve. */
export interface VllmLimit {
  /** What differs, such as "block_size", "kv_cache_layout" or "tp_size". */
  readonly factor: string;
  /** The prefill engine's value. */
  readonly prefill: number | string;
  /** The decode engine's value; for "tp_size" the model's KV heads. */
  readonly decode: number | string;
  /** One sentence for people. */
  readonly text: string;
  /** The remedy. */
  readonly fix: string;
}

/** A pair as one version looks at it. */
export type Looked = CheckedPair & {
  /** `enable_permute_local_kv` serves any local layout; from 0.32 on only LBNHC. */
  readonly permutesToAny?: boolean;
};

/** One check of vLLM. */
export interface VllmRefusal {
  /** A name of ours. */
  readonly id: string;
  /** The function in vLLM's `kv_connector/`. */
  readonly where: string;
  /**
   * The first version that has it; all that are described here, from 0.31 on, where it is absent.
   */
  readonly since?: string;
  /** A part of vLLM's message; empty for an assertion without one. */
  readonly says: string;
  /** `pair`: what handshakes tell decides. `request`: known only when a request runs. */
  readonly known: "pair" | "request";
  /** Whether vLLM refuses the pair at this check, where it gets that far. */
  refuses(pair: Looked): boolean;
  /**
   * What to say of it; `local` is the checking vLLM. Absent where a plan refuses the same pairs
   * with a reason of its own.
   */
  limit?(pair: CheckedPair): Omit<VllmLimit, "prefill" | "decode"> & {
    readonly values: readonly [remote: number | string, local: number | string];
  };
}

/** Checks of one function of vLLM that handshakes decide, where a row does not say otherwise. */
export const refusalsAt = (
  where: string,
  rows: readonly (Omit<VllmRefusal, "where" | "known"> & Partial<VllmRefusal>)[],
): readonly VllmRefusal[] => rows.map((row) => ({ where, known: "pair", ...row }));

/** TP of local over remote; negative where the remote has more ranks. */
export const ratioOf = ({ local, remote }: CheckedPair) =>
  local.tpSize >= remote.tpSize
    ? Math.floor(local.tpSize / remote.tpSize)
    : -Math.floor(remote.tpSize / local.tpSize);
/** Tokens of a local kernel block over those of a remote one. */
export const blockRatio = ({ local, remote }: CheckedPair) => local.blockSize / remote.blockSize;
/** One of the engines shards tokens over its ranks. */
export const hasDcp = ({ local, remote }: CheckedPair) => local.dcpSize > 1 || remote.dcpSize > 1;
/** The regions of the two engines belong to other groups. */
export const groupsDiffer = ({ local, remote }: CheckedPair) =>
  local.regionGroupIds.join() !== remote.regionGroupIds.join();
/** A P with pipeline stages pairs layers by name, not by the order of regions. */
export const pairsByName = ({ local, writes, hasStates, needsHma }: CheckedPair) =>
  writes === true &&
  (local.ppSize ?? 1) > 1 &&
  !hasStates &&
  (needsHma || local.layout.startsWith("BL"));

/** A rank as the other side's vLLM sees it. Throws nothing. */
export function checkedSide(rank: RankGeometry): CheckedSide {
  const { regions, packedMembers = {} } = rank;
  const packed = Object.entries(packedMembers).map(([name, { offsetBytes, lengthBytes }]) => [
    name,
    [offsetBytes, lengthBytes],
  ]);
  return {
    tpSize: rank.tpSize,
    dcpSize: rank.dcpSize ?? 1,
    ppSize: rank.ppSize,
    blockSize: rank.kernelBlockSize,
    kernelsPerLogical: rank.physicalBlocksPerLogical,
    layout: rank.layout,
    attentionBackend: rank.attentionBackend,
    blockLengthsBytes: regions.map(({ blockLengthBytes }) => blockLengthBytes),
    blockStridesBytes: regions.map(({ blockStrideBytes }) => blockStrideBytes),
    regionNames: regions.map(({ name }) => name),
    regionGroupIds: regions.map(({ groupId }) => groupId),
    memoryTypes: regions.map(({ memoryType }) => memoryType),
    packedMembers: Object.fromEntries(packed),
  };
}
