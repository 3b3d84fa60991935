import type { RankGeometry } from "../geometry/rank-geometry.js";

/** One engine of a pair, as the other side's vLLM sees it in a handshake. */
export interface CheckedSide {
  readonly tpSize: number;
  readonly dcpSize: number;
  /** @default 1 */
  readonly pcpSize?: number | undefined;
  /** The checking vLLM knows only its own stage. @default 1 */
  readonly ppSize?: number | undefined;
  readonly blockSize: number;
  readonly kernelsPerLogical: number;
  /** vLLM's name, such as "LBHNC". */
  readonly layout: string;
  /** vLLM's name. */
  readonly attentionBackend: string;
  /** Bytes of a kernel block, by region. */
  readonly blockLengthsBytes: readonly number[];
  /** Bytes from one kernel block to the next, by region. */
  readonly blockStridesBytes: readonly number[];
  /** Undefined where the handshake names none. */
  readonly regionNames: readonly string[] | undefined;
  /** KV cache group by region; -1 where groups share it. */
  readonly regionGroupIds: readonly number[];
  /** By region: "DRAM" or "VRAM". */
  readonly memoryTypes: readonly string[];
  /** By cache in a row with others: offset and length in bytes. @default none */
  readonly packedMembers?: Readonly<Record<string, readonly number[]>> | undefined;
  /** Bytes of a replicated state (vLLM: `ple_block_len`). @default null, the model has none */
  readonly pleBlockLengthBytes?: number | null | undefined;
  /** vLLM's `engine_id`. @default unknown, and not that of the other */
  readonly engineId?: string | undefined;
}

/** What a request asks of a pair, in kernel blocks of each side. */
export interface CheckedRequest {
  /** Blocks that decode has allocated, by KV cache group. */
  readonly decodeBlocks: readonly number[];
  /** Blocks that prefill names, by KV cache group. */
  readonly prefillBlocks: readonly number[];
  /** `remote_num_tokens`; null where the router did not pass it on. */
  readonly numTokens: number | null;
}

/** A pair as vLLM's connector looks at it. */
export interface CheckedPair {
  /** The vLLM that checks: the reader in pull, both sides in push. */
  readonly local: CheckedSide;
  readonly remote: CheckedSide;
  readonly numKvHeads: number;
  readonly isMla: boolean;
  readonly hasStates: boolean;
  /** The model has circular buffers (vLLM: CSA-linear). @default false */
  readonly isCsaLinear?: boolean | undefined;
  readonly cacheDtype: string;
  readonly isPush: boolean;
  /** The checking vLLM is a P that writes. @default false */
  readonly writes?: boolean | undefined;
  readonly prefixCaching: boolean;
  /** `kv_buffer_device` of another kind than the device. */
  readonly usesHostBuffer: boolean;
  /** `enable_permute_local_kv` at the checking vLLM. */
  readonly permutes: boolean;
  /** The model has several kinds of layers. */
  readonly needsHma: boolean;
  /** KV heads of a draft model under MLA, whose cache is the last region; null without one. */
  readonly draftKvHeads: number | null;
  /** @default none: only what every request of the pair meets is checked */
  readonly request?: CheckedRequest | undefined;
}

/** Why vLLM cannot serve a pair that has a plan. */
export interface VllmLimit {
  /** What differs, such as "block_size", "kv_cache_layout" or "tp_size". */
  readonly factor: string;
  readonly prefill: number | string;
  /** The decode engine's value; for "tp_size" the model's KV heads. */
  readonly decode: number | string;
  readonly text: string;
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
  /** First version that has it. Absent: 0.31, the first described here. */
  readonly since?: string;
  /** Empty for an assertion without a message. */
  readonly says: string;
  /** `pair`: handshakes decide. `request`: known only when a request runs. */
  readonly known: "pair" | "request";
  refuses(pair: Looked): boolean;
  /** `local` is the checking vLLM. Absent where a plan refuses the same pairs. */
  limit?(pair: CheckedPair): Omit<VllmLimit, "prefill" | "decode"> & {
    readonly values: readonly [remote: number | string, local: number | string];
  };
}

/** What a side has of each factor. */
const FACTORS = {
  attn_backend_name: ({ attentionBackend }) => attentionBackend,
  block_size: ({ blockSize }) => blockSize,
  dcp_size: ({ dcpSize }) => dcpSize,
  engine_id: ({ engineId }) => String(engineId),
  kv_cache_layout: ({ layout }) => layout,
  packed_member_layouts: membersText,
  ple_block_len: pleBytes,
  region_group_ids: ({ regionGroupIds }) => regionGroupIds.join(),
  region_mem_types: ({ memoryTypes }) => [...new Set(memoryTypes)].join(),
  tp_size: ({ tpSize }) => tpSize,
} satisfies Record<string, (side: CheckedSide) => number | string>;

type Advice = string | ((pair: CheckedPair) => string);

/** The limit of a check that compares both sides' `factor`. */
export const differs =
  (factor: keyof typeof FACTORS, text: Advice, fix: Advice): NonNullable<VllmRefusal["limit"]> =>
  (pair) => {
    const said = (advice: Advice) => (typeof advice === "string" ? advice : advice(pair));
    const values = [FACTORS[factor](pair.remote), FACTORS[factor](pair.local)] as const;
    return { factor, values, text: said(text), fix: said(fix) };
  };

export function membersText({ packedMembers = {} }: CheckedSide): string {
  return Object.entries(packedMembers)
    .map(([name, place]) => `${name} ${place.join("+")}`)
    .sort()
    .join(", ");
}

/** Bytes of a replicated state in a logical block. */
export function pleBytes({ pleBlockLengthBytes, kernelsPerLogical }: CheckedSide): number {
  return (pleBlockLengthBytes ?? 0) * kernelsPerLogical;
}

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
export const hasDcp = ({ local, remote }: CheckedPair) => local.dcpSize > 1 || remote.dcpSize > 1;
export const groupsDiffer = ({ local, remote }: CheckedPair) =>
  local.regionGroupIds.join() !== remote.regionGroupIds.join();
/** A P with pipeline stages pairs layers by name, not by the order of regions. */
export const pairsByName = ({ local, writes, hasStates, needsHma }: CheckedPair) =>
  writes === true &&
  (local.ppSize ?? 1) > 1 &&
  !hasStates &&
  (needsHma || local.layout.startsWith("BL"));

/** Returns a rank as the other side's vLLM sees it. Throws nothing. */
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
