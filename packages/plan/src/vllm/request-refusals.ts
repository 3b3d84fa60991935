import {
  blockRatio,
  type CheckedPair,
  differs,
  groupsDiffer,
  hasDcp,
  pairsByName,
  refusalsAt,
} from "./checked-pair.js";

const READ = "v1/nixl/pull_worker.py, _read_blocks_for_req";
const WRITE = "v1/nixl/push_worker.py, _xfer_blocks_for_req";
const PAIRING = "v1/nixl/base_worker.py, _apply_prefix_caching";

/** D reads region by region where its regions belong to other groups than P's. */
const readsByRegion = (pair: CheckedPair) =>
  !pair.isPush && groupsDiffer(pair) && pair.isMla && !pair.hasStates;
const hasSharedRegion = ({ local, remote }: CheckedPair) =>
  [...local.regionGroupIds, ...remote.regionGroupIds].includes(-1);
const needsCounts = (pair: CheckedPair) =>
  hasDcp(pair) || pair.local.kernelsPerLogical !== pair.remote.kernelsPerLogical;
const countsAreKnown = (pair: CheckedPair) =>
  pair.request?.numTokens != null && !hasSharedRegion(pair);
function pairedCounts(pair: CheckedPair): readonly (readonly [decode: number, prefill: number])[] {
  const { request } = pair;
  const isPaired = pair.isPush ? pair.writes === true : !readsByRegion(pair) && !hasDcp(pair);
  if (request === undefined || !isPaired || !request.decodeBlocks.some((count) => count > 0))
    return [];
  return request.decodeBlocks.map((count, group) => [count, request.prefillBlocks[group] ?? 0]);
}
function regionCounts(pair: CheckedPair): readonly (readonly [decode: number, prefill: number])[] {
  const { request, local, remote } = pair;
  if (request === undefined || !readsByRegion(pair)) return [];
  const count = (blocks: readonly number[], group: number | undefined) =>
    group === -1 ? blocks.reduce((sum, each) => sum + each, 0) : (blocks[group ?? 0] ?? 0);
  return local.regionGroupIds.map((group, region) => [
    count(request.decodeBlocks, group),
    count(request.prefillBlocks, remote.regionGroupIds[region]),
  ]);
}
/** The last group of a model with states is theirs. */
const isState = ({ hasStates }: CheckedPair, group: number, groups: number) =>
  hasStates && group === groups - 1;

/** vLLM's checks when it reads or writes a request's blocks, in their order. */
export const REQUEST_REFUSALS = refusalsAt(READ, [
  {
    id: "read-groups",
    says: "Different NIXL cache-group layouts are only supported for pure MLA models",
    refuses: (pair) => !pair.isPush && groupsDiffer(pair) && (!pair.isMla || pair.hasStates),
    limit: differs(
      "region_group_ids",
      "a vLLM whose model is not MLA alone fails each read from an engine whose regions belong to other KV cache groups",
      "use one layout, one cache dtype and one block size on both sides",
    ),
  },
  {
    id: "read-groups-block-size",
    says: "Region-mapped NIXL transfers require matching physical block sizes",
    refuses: (pair) => readsByRegion(pair) && blockRatio(pair) !== 1,
    limit: differs(
      "block_size",
      ({ local, remote }) =>
        `a vLLM whose regions belong to other KV cache groups fails each read of kernel blocks of ${remote.blockSize} tokens into its own of ${local.blockSize}`,
      "give both the same --block-size",
    ),
  },
  {
    id: "read-shared-regions",
    says: "Region-mapped pulls with DCP or different logical block sizes require remote_num_tokens",
    refuses: (pair) => readsByRegion(pair) && needsCounts(pair) && hasSharedRegion(pair),
    limit: differs(
      "region_group_ids",
      "a vLLM fails each read from an engine whose KV cache groups share regions, where the groups, and DCP sizes or logical blocks, differ",
      "use one layout and one --block-size on both sides",
    ),
  },
  {
    id: "read-num-tokens",
    says: "Region-mapped pulls with DCP or different logical block sizes require remote_num_tokens",
    known: "request",
    refuses: (pair) =>
      pair.request !== undefined &&
      readsByRegion(pair) &&
      needsCounts(pair) &&
      !countsAreKnown(pair),
  },
  {
    id: "read-uncovered",
    where: "v1/nixl/base_worker.py, _apply_dcp_prefix_caching",
    says: "Remote KV pages do not cover the requested range",
    known: "request",
    refuses: (pair) =>
      countsAreKnown(pair) &&
      !hasDcp(pair) &&
      regionCounts(pair).some(([decode, prefill]) => {
        const pages = Math.ceil((pair.request?.numTokens ?? 0) / pair.remote.blockSize);
        return Math.min(decode, pages) > prefill;
      }),
  },
  {
    id: "read-more-pages",
    where: "v1/nixl/base_worker.py, _apply_prefix_caching_by_region",
    says: "Decode allocated more KV pages than the prefill worker supplied",
    known: "request",
    refuses: (pair) =>
      !countsAreKnown(pair) && regionCounts(pair).some(([decode, prefill]) => decode > prefill),
  },
  {
    id: "write-groups",
    where: WRITE,
    says: "NixlPushConnector does not support different producer and consumer cache-group layouts",
    refuses: (pair) => pair.writes === true && groupsDiffer(pair) && !pairsByName(pair),
    limit: differs(
      "region_group_ids",
      "a vLLM prefill worker does not push to an engine whose regions belong to other KV cache groups",
      "use one layout, one cache dtype and one block size on both sides, or pull",
    ),
  },
  {
    id: "more-decode-blocks",
    where: PAIRING,
    says: "",
    known: "request",
    refuses: (pair) =>
      !pair.hasStates && pairedCounts(pair).some(([decode, prefill]) => decode > prefill),
  },
  {
    id: "state-slots",
    where: PAIRING,
    says: "unpairable SSM state slots",
    known: "request",
    refuses: (pair) =>
      pairedCounts(pair).some(
        ([decode, prefill], group, all) => isState(pair, group, all.length) && decode - prefill > 1,
      ),
  },
  {
    id: "states-padding",
    where: PAIRING,
    says: "| > ",
    known: "request",
    refuses: (pair) => {
      const ratios = [pair.local.kernelsPerLogical, pair.remote.kernelsPerLogical] as const;
      return pairedCounts(pair).some(([decode, prefill], group, all) => {
        const isTrimmed = ratios[0] === ratios[1] && decode < prefill;
        const isAttention = pair.hasStates && !isState(pair, group, all.length);
        return isAttention && !isTrimmed && Math.abs(decode - prefill) > ratios[0] + ratios[1];
      });
    },
  },
]);
