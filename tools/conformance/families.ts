import { buildEngineTransferPlan, checkCompatibility } from "@kv/plan";
import * as topology from "@kv/topology";
import { replayBlockIds } from "./block-ids.js";
import { replayDescriptorIds } from "./descriptor-ids.js";
import { replayDescriptors } from "./descriptors.js";
import type { Replay } from "./outcome.js";
import { replayTpMapping } from "./tp-mapping.js";
import { replayValidate } from "./validate.js";

/** A kind of vector. A field that only its inputs have identifies it, so that files may have any name. */
export interface Family {
  readonly name: string;
  readonly field: string;
  readonly replay: Replay;
}

export const FAMILIES: readonly Family[] = [
  { name: "block_ids", field: "fn", replay: replayBlockIds },
  { name: "descs", field: "local_bases", replay: replayDescriptors(buildEngineTransferPlan) },
  { name: "desc_ids", field: "dst_num_blocks", replay: replayDescriptorIds },
  { name: "validate", field: "remote_block_stride", replay: replayValidate(checkCompatibility) },
  { name: "tp_mapping", field: "remote_tp_size", replay: replayTpMapping(topology) },
];

export function familyOf(input: Readonly<Record<string, unknown>>): Family | undefined {
  return FAMILIES.find((family) => family.field in input);
}
