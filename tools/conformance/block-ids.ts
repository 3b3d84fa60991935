import { applyDcpPrefixCaching } from "../../packages/plan/src/request/dcp-blocks.js";
import { fields } from "./fields.js";
import { Difference, type Replay } from "./outcome.js";
import {
  applyPrefixCaching,
  logicalToKernelBlockIds,
  mapBlockIdsForBlockSizeRatio,
} from "./vllm-block-ids.js";

/** vLLM's transformations of block ids; `in.fn` names the function. */
export const replayBlockIds: Replay = (input) => {
  const read = fields(input);
  const fn = read.string("fn");
  if (fn === "logical_to_kernel_block_ids") {
    return logicalToKernelBlockIds(read.kinds("groups"), read.blockIds("block_ids"), read.number("ratio"));
  }
  if (fn === "map_block_ids_for_block_size_ratio") {
    const [local, remote] = [read.blockIds("local_block_ids"), read.blockIds("remote_block_ids")];
    const mapped = mapBlockIdsForBlockSizeRatio(read.kinds("groups"), local, remote, read.number("ratio"));
    return [mapped.localBlockIds, mapped.remoteBlockIds];
  }
  if (fn === "apply_prefix_caching") {
    const trimmed = applyPrefixCaching({
      groups: read.kinds("groups"),
      decodeBlockIds: read.blockIds("decode_block_ids"),
      prefillBlockIds: read.blockIds("prefill_block_ids"),
      decodePhysicalPerLogical: read.number("decode_ppl"),
      prefillPhysicalPerLogical: read.number("prefill_ppl"),
    });
    return [trimmed.decodeBlockIds, trimmed.prefillBlockIds];
  }
  if (fn === "apply_dcp_prefix_caching") {
    const numRemoteBlocks = read.optionalNumber("num_remote_blocks");
    const matched = applyDcpPrefixCaching({
      localIds: read.numbers("local_ids"),
      remoteIds: read.numbers("remote_ids"),
      remoteRank: read.number("remote_rank"),
      localDcpSize: read.number("local_dcp_size"),
      localDcpRank: read.number("local_dcp_rank"),
      remoteDcpSize: read.number("remote_dcp_size"),
      localNumComputedBlocks: read.number("local_num_computed_blocks"),
      ...(numRemoteBlocks === undefined ? {} : { numRemoteBlocks }),
    });
    return [matched.localIds, matched.remoteIds];
  }
  throw new Difference(`in.fn names "${fn}", which is not known here`);
};
