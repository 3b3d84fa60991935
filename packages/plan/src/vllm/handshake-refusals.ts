import {
  blockRatio,
  type CheckedPair,
  differs,
  groupsDiffer,
  hasDcp,
  type Looked,
  ratioOf,
  refusalsAt,
} from "./checked-pair.js";

const VALIDATE = "v1/nixl/base_worker.py, _validate_remote_agent_handshake";

const divide = (one: number, other: number) => one % other === 0 || other % one === 0;
const headsOf = (heads: number, tpSize: number) => Math.max(1, Math.floor(heads / tpSize));
const isReplicated = (pair: CheckedPair) => pair.remote.tpSize > pair.numKvHeads;
const isBlockContiguous = (layout: string) => layout.endsWith("HNC");
const draftHeads = ({ local, remote, draftKvHeads }: CheckedPair) =>
  [headsOf(draftKvHeads ?? 1, local.tpSize), headsOf(draftKvHeads ?? 1, remote.tpSize)] as const;
const isPermuted = ({ local, remote, permutes, isMla, permutesToAny = false }: Looked) =>
  !isMla &&
  permutes &&
  remote.layout === "LBHNC" &&
  (permutesToAny ? local.layout !== "LBHNC" : local.layout === "LBNHC");

/** A region's length is not what vLLM computes from the local one in this way. */
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

/** vLLM's checks of a peer's handshake, in their order (0.31 to 0.33). */
export const HANDSHAKE_REFUSALS = refusalsAt(VALIDATE, [
  {
    id: "dcp-divides",
    says: "DCP sizes must divide one another",
    refuses: ({ local, remote }) => !divide(local.dcpSize, remote.dcpSize),
  },
  {
    id: "dcp-states",
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
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM with kernel blocks of ${local.blockSize} tokens refuses a peer with blocks of ${remote.blockSize}: they must divide its own`,
      "give both the same --block-size, or decode a multiple of prefill's",
    ),
  },
  {
    id: "more-ranks-than-heads",
    says: "",
    refuses: (pair) => !pair.isMla && !pair.hasStates && ratioOf(pair) < 0 && isReplicated(pair),
    limit: ({ remote, numKvHeads }) => ({
      factor: "tp_size",
      values: [remote.tpSize, numKvHeads],
      text: `a vLLM refuses a peer of TP ${remote.tpSize}, more than its own and than the ${numKvHeads} KV heads`,
      fix: `give the peer a TP size of ${numKvHeads} or less`,
    }),
  },
  {
    id: "draft-ranks",
    since: "0.33.0",
    says: "NIXL head-sharded draft KV under an MLA target requires local TP >= remote TP and no DCP",
    refuses: (pair) => pair.draftKvHeads !== null && (ratioOf(pair) < 0 || hasDcp(pair)),
  },
  {
    id: "dcp-groups",
    says: "DCP region pulls require matching logical and physical block sizes",
    refuses: (pair) =>
      hasDcp(pair) &&
      groupsDiffer(pair) &&
      (pair.local.kernelsPerLogical !== 1 || pair.remote.kernelsPerLogical !== 1),
  },
  {
    id: "states-kernel-blocks",
    says: "Prefix caching with heterogeneous physical_blocks_per_logical",
    refuses: ({ local, remote, hasStates, prefixCaching }) =>
      hasStates && prefixCaching && local.kernelsPerLogical !== remote.kernelsPerLogical,
  },
  {
    id: "host-buffer-block-size",
    says: "Heterogeneous block sizes are not supported with host buffer",
    refuses: (pair) => pair.usesHostBuffer && blockRatio(pair) !== 1,
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM that stages in host memory refuses a peer with kernel blocks of ${remote.blockSize} tokens beside its own of ${local.blockSize}`,
      "give both the same --block-size",
    ),
  },
  {
    id: "permute-hma",
    says: "HMA does not support block size post processing",
    refuses: (pair) => isPermuted(pair) && pair.needsHma,
    limit: differs(
      "kv_cache_layout",
      ({ local, remote }) =>
        `a vLLM whose model has several kinds of layers does not permute ${remote.layout} to ${local.layout}`,
      "use one cache layout on both sides",
    ),
  },
  {
    id: "layout",
    says: "Heterogeneous TP expects same kv_cache_layout",
    refuses: (pair) => !pair.isMla && pair.local.layout !== pair.remote.layout && !isPermuted(pair),
  },
  {
    id: "cpu-attention-hma",
    says: "heterogeneous attn post process is not supported with HMA",
    refuses: ({ local, remote, needsHma }) =>
      needsHma &&
      local.attentionBackend === "CPU_ATTN" &&
      remote.attentionBackend !== local.attentionBackend,
    limit: differs(
      "attn_backend_name",
      ({ remote }) =>
        `a vLLM on the CPU whose model has several kinds of layers refuses a peer with ${remote.attentionBackend}`,
      "use the same attention backend at both",
    ),
  },
  {
    id: "contiguous-heads",
    says: "Heterogeneous TP head-dimension splitting requires contiguous heads",
    refuses: (pair) =>
      Math.abs(ratioOf(pair)) !== 1 &&
      !pair.isMla &&
      !isReplicated(pair) &&
      !isBlockContiguous(pair.local.layout) &&
      !isPermuted(pair),
    limit: differs(
      "kv_cache_layout",
      ({ local, remote }) =>
        `a vLLM of TP ${local.tpSize} with the layout ${local.layout} does not split heads with a peer of TP ${remote.tpSize}`,
      "use LBHNC (HND) on both sides, or equal TP sizes",
    ),
  },
  {
    id: "draft-layout",
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
    since: "0.33.0",
    says: "NIXL KV-head re-sharding is not supported for NVFP4 KV cache",
    refuses: ({ local, remote, isMla, numKvHeads, cacheDtype }) =>
      !isMla &&
      cacheDtype.startsWith("nvfp4") &&
      headsOf(numKvHeads, local.tpSize) !== headsOf(numKvHeads, remote.tpSize),
  },
  {
    id: "hybrid-mla-lengths",
    says: "Hybrid MLA kernel-granularity block lengths must match",
    refuses: (pair) =>
      pair.hasStates &&
      pair.isMla &&
      pair.local.blockLengthsBytes.join() !==
        pair.remote.blockLengthsBytes.map((bytes) => bytes * blockRatio(pair)).join(),
  },
  {
    id: "regions",
    says: "Number of KV layers must match between prefill and decode",
    refuses: ({ local, remote, hasStates }) =>
      !hasStates && local.blockLengthsBytes.length !== remote.blockLengthsBytes.length,
  },
  {
    id: "state-regions",
    says: "",
    refuses: ({ local, remote, hasStates }) =>
      hasStates && local.blockLengthsBytes.length !== remote.blockLengthsBytes.length,
  },
  {
    id: "replicated-lengths",
    says: "KV cache sizes must match between P and D when replicated",
    refuses: (pair) => lengthDiffers(pair, "replicated"),
  },
  {
    id: "gathered-block-size",
    says: "Different local/remote block sizes are not supported when P TP > D TP",
    refuses: (pair) =>
      !pair.hasStates &&
      !pair.isMla &&
      !isReplicated(pair) &&
      ratioOf(pair) < 0 &&
      blockRatio(pair) !== 1,
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM of TP ${local.tpSize} with kernel blocks of ${local.blockSize} tokens refuses a peer of TP ${remote.tpSize} with blocks of ${remote.blockSize}`,
      "give both the same --block-size, or prefill a TP size of decode's at most",
    ),
  },
  {
    id: "split-lengths",
    says: "must equal local",
    refuses: (pair) =>
      lengthDiffers(pair, "split") || (blockRatio(pair) === 1 && lengthDiffers(pair, "gathered")),
  },
  {
    id: "strides",
    says: "",
    refuses: ({ remote }) =>
      remote.blockLengthsBytes.some(
        (bytes, region) => (remote.blockStridesBytes[region] ?? 0) < bytes,
      ),
  },
  {
    id: "names",
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
]);
