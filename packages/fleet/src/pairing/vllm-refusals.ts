import { VLLM_VERSIONS } from "@kv/protocol";

/** One engine of a pair, as the other side's vLLM sees it in a handshake. */
export interface CheckedSide {
  /** Tensor-parallel size. */
  readonly tpSize: number;
  /** Decode-context-parallel size. */
  readonly dcpSize: number;
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
  /** KV cache group of each region. */
  readonly regionGroupIds: readonly number[];
}

/** A pair as vLLM's `_validate_remote_agent_handshake` looks at it. */
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
  /** Type of the cache, as vLLM names it. */
  readonly cacheDtype: string;
  /** P writes. */
  readonly isPush: boolean;
  /** The checking vLLM caches prefixes. */
  readonly prefixCaching: boolean;
  /** The checking vLLM stages in host memory (`kv_buffer_device` of another kind than the device). */
  readonly usesHostBuffer: boolean;
  /** `enable_permute_local_kv` at the checking vLLM. */
  readonly permutes: boolean;
  /** The model needs the hybrid cache manager: it has several kinds of layers. */
  readonly needsHma: boolean;
  /** KV heads of a draft model under MLA, whose cache is the last region; null without one. */
  readonly draftKvHeads: number | null;
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
type Looked = CheckedPair & {
  /** `enable_permute_local_kv` serves any local layout; from 0.32 on only LBNHC. */
  readonly permutesToAny?: boolean;
};

/** One check of vLLM. */
export interface VllmRefusal {
  /** A name of ours. */
  readonly id: string;
  /** The function in vLLM's `kv_connector/`. */
  readonly where: string;
  /** The first version that has it; all that are described here, from 0.31 on, where it is absent. @default undefined */
  readonly since?: string;
  /** A part of vLLM's message; empty for an assertion without one. */
  readonly says: string;
  /** Whether vLLM refuses the pair at this check, where it gets that far. */
  refuses(pair: Looked): boolean;
  /** What to say of it; `local` is the checking vLLM. Absent where a plan refuses the same pairs with a reason of its own. */
  limit?(pair: CheckedPair): Omit<VllmLimit, "prefill" | "decode"> & {
    readonly values: readonly [remote: number | string, local: number | string];
  };
}

const VALIDATE = "v1/nixl/base_worker.py, _validate_remote_agent_handshake";

/** TP of local over remote; negative where the remote has more ranks. */
const ratioOf = ({ local, remote }: CheckedPair) =>
  local.tpSize >= remote.tpSize
    ? Math.floor(local.tpSize / remote.tpSize)
    : -Math.floor(remote.tpSize / local.tpSize);
const divide = (one: number, other: number) => one % other === 0 || other % one === 0;
const headsOf = (heads: number, tpSize: number) => Math.max(1, Math.floor(heads / tpSize));
const isReplicated = (pair: CheckedPair) => pair.remote.tpSize > pair.numKvHeads;
const isBlockContiguous = (layout: string) => layout.endsWith("HNC");
const hasDcp = ({ local, remote }: CheckedPair) => local.dcpSize > 1 || remote.dcpSize > 1;
const blockRatio = ({ local, remote }: CheckedPair) => local.blockSize / remote.blockSize;
const draftHeads = ({ local, remote, draftKvHeads }: CheckedPair) =>
  [headsOf(draftKvHeads ?? 1, local.tpSize), headsOf(draftKvHeads ?? 1, remote.tpSize)] as const;
/** The enabled conversion from LBHNC applies. */
const isPermuted = ({ local, remote, permutes, isMla, permutesToAny = false }: Looked) =>
  !isMla &&
  permutes &&
  remote.layout === "LBHNC" &&
  (permutesToAny ? local.layout !== "LBHNC" : local.layout === "LBNHC");

/** Whether a region's length is not what vLLM computes from the local one; `kind` is the way in which it computes it. */
function lengthDiffers(pair: CheckedPair, kind: "replicated" | "split" | "gathered"): boolean {
  const { local, remote, isMla, numKvHeads, draftKvHeads, hasStates } = pair;
  if (hasStates || local.blockLengthsBytes.length !== remote.blockLengthsBytes.length) return false;
  return local.blockLengthsBytes.some((localBytes, region) => {
    const isDraft = draftKvHeads !== null && region === local.blockLengthsBytes.length - 1;
    const [localHeads, remoteHeads] = isDraft
      ? draftHeads(pair)
      : [headsOf(numKvHeads, local.tpSize), headsOf(numKvHeads, remote.tpSize)];
    const replicated = !isDraft && (isMla || isReplicated(pair));
    const way = replicated ? "replicated" : ratioOf(pair) > 0 ? "split" : "gathered";
    if (way !== kind) return false;
    const whole = replicated ? localBytes : Math.floor((localBytes * remoteHeads) / localHeads);
    const ratio = way === "gathered" ? 1 : blockRatio(pair);
    return remote.blockLengthsBytes[region] !== Math.floor(whole / ratio);
  });
}

/** vLLM's checks of a peer's handshake, in their order (0.31 to 0.33). `tools/vllm/refusals.ts` compares them with vLLM's own code. */
export const VLLM_REFUSALS: readonly VllmRefusal[] = [
  {
    id: "dcp-divides",
    where: VALIDATE,
    says: "DCP sizes must divide one another",
    refuses: ({ local, remote }) => !divide(local.dcpSize, remote.dcpSize),
  },
  {
    id: "dcp-states",
    where: VALIDATE,
    says: "Hybrid MLA+Mamba NIXL transfers require matching DCP sizes",
    refuses: ({ local, remote, hasStates }) => hasStates && local.dcpSize !== remote.dcpSize,
  },
  {
    id: "tp-divides",
    where: "utils.py, TransferTopology.tp_ratio",
    says: "is not divisible by",
    refuses: ({ local, remote }) => !divide(local.tpSize, remote.tpSize),
  },
  {
    id: "block-size-divides",
    where: "utils.py, TransferTopology.block_size_ratio",
    says: "Local block size",
    refuses: (pair) => !Number.isInteger(blockRatio(pair)),
    limit: ({ local, remote }) => ({
      factor: "block_size",
      values: [remote.blockSize, local.blockSize],
      text: `a vLLM with kernel blocks of ${local.blockSize} tokens refuses a peer with blocks of ${remote.blockSize}: they must divide its own`,
      fix: "give both the same --block-size, or decode a multiple of prefill's",
    }),
  },
  {
    id: "more-ranks-than-heads",
    where: VALIDATE,
    says: "",
    refuses: (pair) => !pair.isMla && !pair.hasStates && ratioOf(pair) < 0 && isReplicated(pair),
    limit: ({ remote, numKvHeads }) => ({
      factor: "tp_size",
      values: [remote.tpSize, numKvHeads],
      text: `a vLLM refuses a peer of TP ${remote.tpSize}, more than its own and than the ${numKvHeads} KV heads`,
      fix: `start prefill with TP ${numKvHeads} or less`,
    }),
  },
  {
    id: "draft-ranks",
    where: VALIDATE,
    since: "0.33.0",
    says: "NIXL head-sharded draft KV under an MLA target requires local TP >= remote TP and no DCP",
    refuses: (pair) => pair.draftKvHeads !== null && (ratioOf(pair) < 0 || hasDcp(pair)),
  },
  {
    id: "dcp-groups",
    where: VALIDATE,
    says: "DCP region pulls require matching logical and physical block sizes",
    refuses: (pair) =>
      hasDcp(pair) &&
      pair.local.regionGroupIds.join() !== pair.remote.regionGroupIds.join() &&
      (pair.local.kernelsPerLogical !== 1 || pair.remote.kernelsPerLogical !== 1),
  },
  {
    id: "states-kernel-blocks",
    where: VALIDATE,
    says: "Prefix caching with heterogeneous physical_blocks_per_logical",
    refuses: ({ local, remote, hasStates, prefixCaching }) =>
      hasStates && prefixCaching && local.kernelsPerLogical !== remote.kernelsPerLogical,
  },
  {
    id: "host-buffer-block-size",
    where: VALIDATE,
    says: "Heterogeneous block sizes are not supported with host buffer",
    refuses: (pair) => pair.usesHostBuffer && blockRatio(pair) !== 1,
    limit: ({ local, remote }) => ({
      factor: "block_size",
      values: [remote.blockSize, local.blockSize],
      text: `a vLLM that stages in host memory refuses a peer with kernel blocks of ${remote.blockSize} tokens beside its own of ${local.blockSize}`,
      fix: "give both the same --block-size",
    }),
  },
  {
    id: "permute-hma",
    where: VALIDATE,
    says: "HMA does not support block size post processing",
    refuses: (pair) => isPermuted(pair) && pair.needsHma,
    limit: ({ local, remote }) => ({
      factor: "kv_cache_layout",
      values: [remote.layout, local.layout],
      text: `a vLLM whose model has several kinds of layers does not permute ${remote.layout} to ${local.layout}`,
      fix: "use one cache layout on both sides",
    }),
  },
  {
    id: "layout",
    where: VALIDATE,
    says: "Heterogeneous TP expects same kv_cache_layout",
    refuses: (pair) => !pair.isMla && pair.local.layout !== pair.remote.layout && !isPermuted(pair),
  },
  {
    id: "cpu-attention-hma",
    where: VALIDATE,
    says: "heterogeneous attn post process is not supported with HMA",
    refuses: ({ local, remote, needsHma }) =>
      needsHma && local.attentionBackend === "CPU_ATTN" && remote.attentionBackend !== local.attentionBackend,
    limit: ({ local, remote }) => ({
      factor: "attn_backend_name",
      values: [remote.attentionBackend, local.attentionBackend],
      text: `a vLLM on the CPU whose model has several kinds of layers refuses a peer with ${remote.attentionBackend}`,
      fix: "use the same attention backend at both",
    }),
  },
  {
    id: "contiguous-heads",
    where: VALIDATE,
    says: "Heterogeneous TP head-dimension splitting requires contiguous heads",
    refuses: (pair) =>
      Math.abs(ratioOf(pair)) !== 1 &&
      !pair.isMla &&
      !isReplicated(pair) &&
      !isBlockContiguous(pair.local.layout) &&
      !isPermuted(pair),
    limit: ({ local, remote }) => ({
      factor: "kv_cache_layout",
      values: [remote.layout, local.layout],
      text: `a vLLM of TP ${local.tpSize} with the layout ${local.layout} does not split heads with a peer of TP ${remote.tpSize}`,
      fix: "use LBHNC (HND) on both sides, or equal TP sizes",
    }),
  },
  {
    id: "draft-layout",
    where: VALIDATE,
    since: "0.33.0",
    says: "Head-sharded draft KV under an MLA target needs the same block-contiguous kv_cache_layout",
    refuses(pair) {
      const [local, remote] = draftHeads(pair);
      return (
        pair.draftKvHeads !== null &&
        local !== remote &&
        (pair.local.layout !== pair.remote.layout || !isBlockContiguous(pair.local.layout))
      );
    },
  },
  {
    id: "nvfp4",
    where: VALIDATE,
    since: "0.33.0",
    says: "NIXL KV-head re-sharding is not supported for NVFP4 KV cache",
    refuses: ({ local, remote, isMla, numKvHeads, cacheDtype }) =>
      !isMla &&
      cacheDtype.startsWith("nvfp4") &&
      headsOf(numKvHeads, local.tpSize) !== headsOf(numKvHeads, remote.tpSize),
  },
  {
    id: "hybrid-mla-lengths",
    where: VALIDATE,
    says: "Hybrid MLA kernel-granularity block lengths must match",
    refuses: (pair) =>
      pair.hasStates &&
      pair.isMla &&
      pair.local.blockLengthsBytes.join() !==
        pair.remote.blockLengthsBytes.map((bytes) => bytes * blockRatio(pair)).join(),
  },
  {
    id: "regions",
    where: VALIDATE,
    says: "Number of KV layers must match between prefill and decode",
    refuses: ({ local, remote, hasStates }) =>
      !hasStates && local.blockLengthsBytes.length !== remote.blockLengthsBytes.length,
  },
  {
    id: "replicated-lengths",
    where: VALIDATE,
    says: "KV cache sizes must match between P and D when replicated",
    refuses: (pair) => lengthDiffers(pair, "replicated"),
  },
  {
    id: "gathered-block-size",
    where: VALIDATE,
    says: "Different local/remote block sizes are not supported when P TP > D TP",
    refuses: (pair) =>
      !pair.hasStates && !pair.isMla && !isReplicated(pair) && ratioOf(pair) < 0 && blockRatio(pair) !== 1,
    limit: ({ local, remote }) => ({
      factor: "block_size",
      values: [remote.blockSize, local.blockSize],
      text: `a vLLM of TP ${local.tpSize} with kernel blocks of ${local.blockSize} tokens refuses a peer of TP ${remote.tpSize} with blocks of ${remote.blockSize}`,
      fix: "give both the same --block-size, or prefill a TP size of decode's at most",
    }),
  },
  {
    id: "split-lengths",
    where: VALIDATE,
    says: "must equal local",
    refuses: (pair) =>
      lengthDiffers(pair, "split") || (blockRatio(pair) === 1 && lengthDiffers(pair, "gathered")),
  },
  {
    id: "strides",
    where: VALIDATE,
    says: "",
    refuses: ({ remote }) =>
      remote.blockLengthsBytes.some((bytes, region) => (remote.blockStridesBytes[region] ?? 0) < bytes),
  },
  {
    id: "names",
    where: VALIDATE,
    says: "NIXL transfer regions must name the same model caches in the same order",
    refuses: ({ local, remote }) =>
      remote.regionNames !== undefined && remote.regionNames.join() !== local.regionNames?.join(),
  },
  {
    id: "push-draft",
    where: "v1/nixl/push_worker.py, _validate_remote_agent_handshake",
    since: "0.33.0",
    says: "NIXL push mode does not support a head-sharded draft's KV",
    refuses: ({ local, remote, isPush, draftKvHeads }) =>
      isPush && draftKvHeads !== null && local.tpSize !== remote.tpSize,
  },
];

const indexOf = (version: string) => VLLM_VERSIONS.findIndex((each) => each.version === version);

/** The check at which a vLLM of a described version refuses a pair; undefined where it takes it. Versions before 0.31 are taken for 0.31. Throws nothing. */
export function refusalOf(pair: CheckedPair, version: string): VllmRefusal | undefined {
  const at = indexOf(version);
  const looked: Looked = {
    ...pair,
    permutesToAny: at < indexOf("0.32.0"),
    // Before 0.33 a draft model's cache counts as the target's.
    draftKvHeads: at < indexOf("0.33.0") ? null : pair.draftKvHeads,
  };
  return VLLM_REFUSALS.find(
    ({ since, refuses }) => (since === undefined || at >= indexOf(since)) && refuses(looked),
  );
}
