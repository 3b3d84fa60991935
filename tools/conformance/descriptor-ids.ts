import { fields } from "./fields.js";
import type { Replay } from "./outcome.js";
import { computeDescriptorIds } from "./vllm-descriptor-ids.js";

/** vLLM's `_compute_desc_ids`. */
export const replayDescriptorIds: Replay = (input) => {
  const read = fields(input);
  const regionNumBlocks = read.optionalNumbers("region_num_blocks");
  const given = read.optionalNumbers("region_group_ids");
  const layers = read.optionalNumbers("transfer_layer_group_ids");
  const convDims = read.optionalNumbers("conv_dims");
  const stateRegions = read.optionalNumbers("ssm_region_indices");
  const scratchRegions = read.optionalNumbers("scratch_region_indices");
  const ratio = read.optionalNumber("block_size_ratio");
  return computeDescriptorIds({
    groups: read.kinds("groups"),
    blockIds: read.blockIds("block_ids"),
    numRegions: read.number("num_regions"),
    numBlocks: read.number("dst_num_blocks"),
    physicalBlocksPerLogical: read.number("physical_blocks_per_logical"),
    regionGroupIds: given ?? read.numbers("self_region_group_ids"),
    ...(regionNumBlocks === undefined ? {} : { regionNumBlocks }),
    ...(read.present("uses_region_group_mapping")
      ? { usesRegionGroupMapping: read.boolean("uses_region_group_mapping") }
      : {}),
    ...(ratio === undefined ? {} : { blockSizeRatio: ratio }),
    ...(scratchRegions === undefined ? {} : { scratchRegions }),
    ...(layers === undefined ? {} : { transferLayerGroupIds: layers }),
    ...(convDims === undefined
      ? {}
      : {
          stateSpace: {
            convProjections: convDims.length,
            ...(stateRegions === undefined ? {} : { regions: stateRegions }),
          },
        }),
  });
};
