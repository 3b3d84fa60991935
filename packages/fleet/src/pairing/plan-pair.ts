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

/** Two engines, each by the metadata of its rank (0, 0), and what handshakes do not carry. */
export interface PairToPlan {
  readonly prefill: AgentMetadata;
  readonly decode: AgentMetadata;
  readonly prefillTp: number;
  readonly decodeTp: number;
  /** KV heads of the model; ignored for MLA. */
  readonly numKvHeads: number;
  readonly groups: readonly KvCacheKind[];
  /**
   * Type of the cache as vLLM names it, where it is known; vLLM can split the blocks of "auto" by
   * head. @default "auto"
   */
  readonly cacheDtype?: string | undefined;
}

/** Whether the engine's attention is MLA, by the name of its backend. */
export function hasMla({ attentionBackend }: AgentMetadata): boolean {
  return attentionBackend.includes("MLA");
}

/** Whether the engine keeps states of recurrent layers. */
export function hasStates({ ssmSizes }: AgentMetadata): boolean {
  return ssmSizes.some((bytes) => bytes > 0);
}

/**
 * The kinds of `count` KV cache groups. Kinds are not on the wire: every group counts as attention,
 * MLA by the backend's name.
 */
export function assumedGroups(metadata: AgentMetadata, count?: number): readonly KvCacheKind[] {
  const groups =
    count ?? 1 + (metadata.regionGroupIds ?? [0]).reduce((most, id) => Math.max(most, id), 0);
  return Array.from({ length: groups }, () => (hasMla(metadata) ? "mla" : "full"));
}

/**
 * A rank's memory as `@kv/plan` describes it. Fields that older servers do not announce get vLLM's
 * defaults.
 */
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
 * The transfer plan of each rank in `decodeRanks` (default: all), where every rank of an engine is
 * like its rank (0, 0).
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

/** All conversions that a decode engine may be able to do after a receive. */
export const CONVERSIONS: readonly ReceiveConversion[] = ["attention-order", "hnd-to-nhd"];

/** The sides of a pair that are vLLM, and how KV is moved. */
interface VllmSides {
  /** P writes. */
  readonly isPush: boolean;
  /**
   * One of the engines is vLLM, or both are. Engines of this project push to blocks of any size.
   */
  readonly hasVllm: boolean;
  readonly decodeIsVllm: boolean;
  /** The prefill engine is vLLM; in push it checks decode too. */
  readonly prefillIsVllm: boolean;
  readonly decodeVersion: string | undefined;
}

/**
 * Why vLLM (0.33, unless its version says otherwise) cannot serve a pair that has a plan; undefined
 * where it can.
 */
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
  // Its worker repacks after the handshake of a heartbeat. That of a registration
  // (`notif_agents_only` in `nixl/push_worker.py`) may come first.
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
  // In push both sides check the other.
  const asked = decodeIsVllm ? limitOf(pair, isPush, "decode", decodeVersion) : undefined;
  return (
    asked ?? (isPush && prefillIsVllm ? limitOf(pair, isPush, "prefill", undefined) : undefined)
  );
}

/** What the vLLM on one side says of the other, where a plan does not say it. */
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

/**
 * What vLLM reads of an engine beside the geometry of a rank. Where names are absent, vLLM compares
 * none.
 */
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
