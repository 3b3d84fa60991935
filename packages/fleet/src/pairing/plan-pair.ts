import type { KvCacheKind } from "@kv/interface";
import {
  buildEngineTransferPlan,
  type EngineTransferPlan,
  type RankGeometry,
  type ReceiveConversion,
} from "@kv/plan";
import { type CheckedSide, checkedSide, type VllmLimit, vllmLimitOf } from "@kv/plan/vllm";
import { type AgentMetadata, describedVersion, NEWEST_VLLM_VERSION } from "@kv/protocol";
import { handshakeTargetRanks } from "@kv/topology";

/** Two engines, by the metadata of their ranks (0, 0), and what handshakes do not carry. */
export interface PairToPlan {
  readonly prefill: AgentMetadata;
  readonly decode: AgentMetadata;
  readonly prefillTp: number;
  readonly decodeTp: number;
  /** Ignored for MLA. */
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
  /** vLLM's name of the cache's type; vLLM can split blocks of "auto" by head. @default "auto" */
  readonly cacheDtype?: string | undefined;
}

/** Decides by the name of the attention's backend. */
export function hasMla({ attentionBackend }: AgentMetadata): boolean {
  return attentionBackend.includes("MLA");
}

/** Whether the engine keeps states of recurrent layers. */
export function hasStates({ ssmSizes }: AgentMetadata): boolean {
  return ssmSizes.some((bytes) => bytes > 0);
}

/**
 * Kinds of `count` KV cache groups. They are not on the wire, so all count as attention, or MLA by
 * the backend's name.
 */
export function assumedGroups(metadata: AgentMetadata, count?: number): readonly KvCacheKind[] {
  const groups =
    count ?? 1 + (metadata.regionGroupIds ?? [0]).reduce((most, id) => Math.max(most, id), 0);
  return Array.from({ length: groups }, () => (hasMla(metadata) ? "mla" : "full"));
}

/** A rank's memory for `@kv/plan`. Fields that older servers lack get vLLM's defaults. */
export function rankGeometry(
  metadata: AgentMetadata,
  rank: { tpRank: number; tpSize: number },
): RankGeometry {
  const [convBytes = 0, recurrentBytes = 0] = metadata.ssmSizes;
  return {
    ...rank,
    ...(hasStates(metadata) ? { stateSpace: { convBytes, recurrentBytes } } : {}),
    dcpSize: metadata.dcpSize,
    kernelBlockSize: metadata.blockSize,
    physicalBlocksPerLogical: metadata.physicalBlocksPerLogical,
    layout: metadata.kvCacheLayout,
    attentionBackend: metadata.attentionBackend,
    deviceId: metadata.deviceId,
    regions: metadata.baseAddresses.map((baseAddress, index) => {
      const blockLengthBytes = metadata.blockLengthsBytes[index] ?? 0;
      return {
        name: metadata.regionNames?.[index] ?? `region ${index}`,
        baseAddress,
        numBlocks: metadata.regionNumBlocks?.[index] ?? metadata.numBlocks,
        blockLengthBytes,
        blockStrideBytes: metadata.blockStridesBytes[index] ?? blockLengthBytes,
        groupId: metadata.regionGroupIds?.[index] ?? 0,
        memoryType: metadata.regionMemoryTypes?.[index] ?? "DRAM",
      };
    }),
  };
}

/**
 * The transfer plan of each rank in `decodeRanks` (default: all), where all ranks equal rank (0,
 * 0).
 *
 * @throws those of `buildEngineTransferPlan`.
 */
export function planRanks(
  { prefill, decode, prefillTp, decodeTp, numKvHeads, groups, cacheDtype }: PairToPlan,
  conversions: readonly ReceiveConversion[] = [],
  decodeRanks: readonly number[] = Array.from({ length: decodeTp }, (_, tpRank) => tpRank),
): EngineTransferPlan[] {
  return decodeRanks.map((tpRank) => {
    const ranks = handshakeTargetRanks({ tpRank, tpSize: decodeTp, remoteTpSize: prefillTp });
    return buildEngineTransferPlan({
      local: rankGeometry(decode, { tpRank, tpSize: decodeTp }),
      remotes: ranks.map((rank) => rankGeometry(prefill, { tpRank: rank, tpSize: prefillTp })),
      numKvHeads,
      groups,
      cacheDtype,
      conversions,
    });
  });
}

/** All conversions of a decode engine after a receive. */
export const CONVERSIONS: readonly ReceiveConversion[] = ["attention-order", "hnd-to-nhd"];

interface VllmSides {
  readonly isPush: boolean;
  /** Engines of this project push to blocks of any size. */
  readonly hasVllm: boolean;
  readonly decodeIsVllm: boolean;
  readonly prefillIsVllm: boolean;
  readonly decodeVersion: string | undefined;
}

/** Why vLLM (0.33, or its stated version) cannot serve a pair with a plan; else undefined. */
export function vllmLimit(
  pair: PairToPlan,
  { isPush, hasVllm, decodeIsVllm, prefillIsVllm, decodeVersion }: VllmSides,
): VllmLimit | undefined {
  const { prefill, decode } = pair;
  const sizes = [prefill.blockSize, decode.blockSize] as const;
  if (isPush && hasVllm && sizes[0] !== sizes[1]) {
    const text = `push with kernel blocks of ${sizes[0]} and ${sizes[1]} tokens fails at prefill, or stops the decode engine`;
    const fix =
      "give both the same --block-size, use pull, or set push_announced_block_size at a prefill worker of this project";
    return { factor: "block_size", prefill: sizes[0], decode: sizes[1], text, fix };
  }
  const backends = [prefill.attentionBackend, decode.attentionBackend] as const;
  // Its worker repacks after a heartbeat's handshake, but a registration's (`notif_agents_only` in
  // `nixl/push_worker.py`) may come first.
  if (
    isPush &&
    decodeIsVllm &&
    decode.attentionBackend === "CPU_ATTN" &&
    backends[0] !== backends[1]
  ) {
    const text = `a vLLM decode worker on the CPU may take pushed KV of ${backends[0]} for its own ${backends[1]}: the text is wrong, without an error`;
    const fix = "use pull, or the same attention backend at both";
    return { factor: "attn_backend_name", prefill: backends[0], decode: backends[1], text, fix };
  }
  const release = decodeVersion === undefined ? undefined : describedVersion(decodeVersion);
  if (release?.mixesUpSmallerBlocks === true && !hasMla(prefill) && sizes[0] < sizes[1]) {
    const text = `a decode worker of vLLM ${release.version} with blocks of ${sizes[1]} tokens mixes up blocks of ${sizes[0]}: the text is wrong, without an error`;
    const fix = "give both the same --block-size, or upgrade to vLLM 0.32";
    return { factor: "block_size", prefill: sizes[0], decode: sizes[1], text, fix };
  }
  const asked = decodeIsVllm ? limitOf(pair, isPush, "decode", decodeVersion) : undefined;
  return (
    asked ?? (isPush && prefillIsVllm ? limitOf(pair, isPush, "prefill", undefined) : undefined)
  );
}

function limitOf(
  { prefill, decode, prefillTp, decodeTp, numKvHeads, groups, cacheDtype = "auto" }: PairToPlan,
  isPush: boolean,
  checking: "prefill" | "decode",
  version = NEWEST_VLLM_VERSION.version as string,
): VllmLimit | undefined {
  const sides = { prefill: sideOf(prefill, prefillTp), decode: sideOf(decode, decodeTp) };
  const [local, remote] =
    checking === "decode" ? [sides.decode, sides.prefill] : [sides.prefill, sides.decode];
  const release = describedVersion(version)?.version ?? NEWEST_VLLM_VERSION.version;
  const model = { numKvHeads, groups, cacheDtype };
  return vllmLimitOf(
    {
      local,
      remote,
      model,
      hasStates: hasStates(prefill),
      mode: isPush ? "push" : "pull",
      checking,
    },
    release,
  );
}

/** vLLM does not compare absent names. */
function sideOf(metadata: AgentMetadata, tpSize: number): CheckedSide {
  const {
    engineId,
    regionNames,
    pcpSize,
    pleBlockLengthBytes,
    packedMemberLayouts: packedMembers,
  } = metadata;
  const rank = rankGeometry(metadata, { tpRank: 0, tpSize });
  return {
    ...checkedSide(rank),
    engineId,
    regionNames,
    packedMembers,
    pcpSize,
    pleBlockLengthBytes,
  };
}
