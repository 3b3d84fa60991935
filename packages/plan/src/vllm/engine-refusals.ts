import {
  blockRatio,
  type CheckedPair,
  type CheckedSide,
  differs,
  membersText,
  pairsByName,
  pleBytes,
  ratioOf,
  refusalsAt,
} from "./checked-pair.js";

const ADD = "v1/nixl/base_worker.py, add_remote_agent";
const PARALLEL = "v1/nixl/base_worker.py, _validate_remote_parallel_config";

const isReplicatedPcp = (one: CheckedSide, other: CheckedSide) =>
  (one.pcpSize ?? 1) > 1 && one.dcpSize === 1 && other.dcpSize > 1;
const isPacked = ({ packedMembers = {} }: CheckedSide) => Object.keys(packedMembers).length > 0;
export const readsPackedRows = (pair: CheckedPair) =>
  isPacked(pair.remote) && !isPacked(pair.local) && !pairsByName(pair);
export const packedRow = ({ remote: { regionNames = [], packedMembers = {} } }: CheckedPair) =>
  regionNames.findIndex((name) => Object.hasOwn(packedMembers, name));
/** Remote ranks whose heads a local rank needs. */
const sourceRanks = ({ local, remote, numKvHeads }: CheckedPair) =>
  Math.min(
    Math.floor(remote.tpSize / local.tpSize),
    Math.max(1, Math.floor(numKvHeads / local.tpSize)),
  );

/** vLLM's checks of a peer before those of its handshake, in their order. */
export const ENGINE_REFUSALS = refusalsAt(ADD, [
  {
    id: "csa-linear-heads",
    where: "v1/nixl/base_worker.py, _validate_csa_linear_tp_layout",
    says: "CSA-linear NIXL requires both endpoints on the same side of",
    refuses: ({ local, remote, isCsaLinear = false, numKvHeads }) =>
      isCsaLinear && local.tpSize < numKvHeads !== remote.tpSize < numKvHeads,
    limit: differs(
      "tp_size",
      ({ local, remote, numKvHeads }) =>
        `a vLLM whose model has circular buffers does not pair TP ${local.tpSize} with TP ${remote.tpSize}: one side has fewer ranks than the ${numKvHeads} KV heads`,
      ({ numKvHeads }) =>
        `give both a TP size below ${numKvHeads}, or both one of ${numKvHeads} or more`,
    ),
  },
  {
    id: "pcp-spans-dcp",
    where: PARALLEL,
    says: "Remote NixlConnector PCP+DCP does not span the full PCP group",
    refuses: ({ remote: { pcpSize = 1, dcpSize } }) =>
      pcpSize > 1 && dcpSize !== 1 && dcpSize !== pcpSize,
    limit: differs(
      "dcp_size",
      ({ remote: { pcpSize = 1, dcpSize } }) =>
        `a vLLM refuses a peer with PCP ${pcpSize} and DCP ${dcpSize}`,
      "give prefill a DCP size of 1 or of its PCP size",
    ),
  },
  {
    id: "replicated-pcp",
    where: PARALLEL,
    says: "Replicated PCP cannot be paired with a DCP-sharded NIXL peer",
    refuses: ({ local, remote }) =>
      isReplicatedPcp(local, remote) || isReplicatedPcp(remote, local),
    limit: differs(
      "dcp_size",
      "a vLLM does not pair an engine with PCP and no DCP with one that has DCP",
      "use DCP on both sides, or on neither",
    ),
  },
  {
    id: "stages-block-size",
    says: "Attention-HMA push requires identical P/D block sizes",
    refuses: (pair) => pairsByName(pair) && pair.local.blockSize !== pair.remote.blockSize,
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM with pipeline stages does not push kernel blocks of ${local.blockSize} tokens to an engine with ${remote.blockSize}`,
      "give both the same --block-size",
    ),
  },
  {
    id: "stages-tp",
    says: "Attention-HMA push does not support decode TP greater than prefill TP yet",
    refuses: (pair) => pairsByName(pair) && !pair.isMla && pair.remote.tpSize > pair.local.tpSize,
    limit: differs(
      "tp_size",
      ({ local, remote }) =>
        `a vLLM with pipeline stages of TP ${local.tpSize} does not push to an engine of TP ${remote.tpSize}`,
      "decode with prefill's TP size at most",
    ),
  },
  {
    id: "packed-names",
    where: "v1/nixl/base_worker.py, _split_remote_packed_rows",
    since: "0.33.0",
    says: "Remote advertised no region_names",
    refuses: (pair) => readsPackedRows(pair) && pair.remote.regionNames === undefined,
  },
  {
    id: "packed-groups",
    where: "v1/nixl/base_worker.py, _split_remote_packed_rows",
    since: "0.33.0",
    says: "Reading multi-group packed KV rows into per-layer regions is not supported",
    refuses: (pair) => readsPackedRows(pair) && pair.remote.regionGroupIds[packedRow(pair)] === -1,
    limit: differs(
      "kv_cache_layout",
      ({ local, remote }) =>
        `a vLLM with the layout ${local.layout} does not read rows of ${remote.layout} that several KV cache groups share`,
      "use one cache layout on both sides (VLLM_KV_CACHE_LAYOUT)",
    ),
  },
  {
    id: "packed-rows",
    since: "0.33.0",
    says: "Packed KV block rows differ between P and D",
    refuses: (pair) =>
      isPacked(pair.local) &&
      !pairsByName(pair) &&
      membersText(pair.local) !== membersText(pair.remote),
    limit: differs(
      "packed_member_layouts",
      ({ local }) =>
        `a vLLM whose rows hold the pages of all layers (${local.layout}) refuses a peer whose rows differ`,
      "use one cache layout and one --block-size on both sides",
    ),
  },
  {
    id: "own-engine-id",
    where: "utils.py, TransferTopology.register_remote_engine",
    says: "Cannot register local engine",
    refuses: ({ local, remote }) =>
      local.engineId !== undefined && local.engineId === remote.engineId,
    limit: differs(
      "engine_id",
      ({ local }) =>
        `both servers are engine ${local.engineId}: a vLLM refuses a peer with its own engine_id`,
      "give two servers, and leave engine_id out of --kv-transfer-config or give each its own",
    ),
  },
]);

/** vLLM's checks when it lists a peer's blocks, after those of its handshake, in their order. */
export const LIST_REFUSALS = refusalsAt(ADD, [
  {
    id: "gathered-states-block-size",
    where: "v1/nixl/base_worker.py, _build_local_splits_from_plan",
    says: "Head-sharded attention reads with P_TP > D_TP and heterogeneous block sizes are not supported",
    refuses: (pair) =>
      pair.hasStates &&
      !pair.isMla &&
      ratioOf(pair) < 0 &&
      blockRatio(pair) !== 1 &&
      sourceRanks(pair) > 1,
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM of TP ${local.tpSize} with kernel blocks of ${local.blockSize} tokens and states refuses a peer of TP ${remote.tpSize} with blocks of ${remote.blockSize}`,
      "give both the same --block-size, or prefill a TP size of decode's at most",
    ),
  },
  {
    id: "ple",
    where: "v1/nixl/base_worker.py, _build_mamba_remote",
    // 0.31 compares region lengths, which its handshake has for whole blocks only.
    since: "0.32.0",
    says: "PLE pages require identical P/D geometry",
    refuses: ({ local, remote, hasStates }) => hasStates && pleBytes(local) !== pleBytes(remote),
    limit: differs(
      "ple_block_len",
      "a vLLM refuses a peer whose replicated state has another size",
      "give both the same --block-size and --dtype",
    ),
  },
  {
    id: "mixed-memory",
    says: "NIXL pull does not yet support a mixed-memory producer",
    refuses: ({ remote }) => new Set(remote.memoryTypes).size > 1,
    limit: differs(
      "region_mem_types",
      "a vLLM refuses a peer with regions in host and in device memory",
      "keep the whole KV cache of prefill in one kind of memory",
    ),
  },
]);
