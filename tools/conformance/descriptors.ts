import { DESCRIPTOR_ROW, type DescriptorTable } from "@kv/interface";
import { buildEngineTransferPlan, type EngineTransferPlan, type RankGeometry } from "@kv/plan";
import { mappingAsJson } from "./families.js";
import { fields } from "./fields.js";
import { Difference, type Replay } from "./outcome.js";
import { same } from "./recordings.js";

type Descriptor = readonly [address: number, lengthBytes: number, deviceId: number];

/**
 * vLLM's `_build_fa_local`, `_build_fa_remote`, their state-space counterparts and `_build_local_splits_from_plan`, against the tables
 * of a whole plan. Where our order differs, descriptors are looked up by region, block and part.
 */
export const replayDescriptors: Replay = (input, expected) => {
  const plan = planOf(input);
  const summary = {
    tp_ratio:
      fields(input).number("tp_size") >= fields(input).number("remote_tp_size")
        ? plan.local.tpSize / plan.remote.tpSize
        : -(plan.remote.tpSize / plan.local.tpSize),
    block_size_ratio: plan.blockSizeRatio,
    mapping: mappingAsJson(plan.mapping),
  };
  for (const source of plan.sources) [source.localTable, source.remoteTable].forEach(expand);
  if (expected === undefined) return summary;
  const theirs = expected as {
    local: Descriptor[];
    remote: Descriptor[];
    splits?: Descriptor[][];
    needs_split: boolean;
    local_raw: unknown;
    remote_raw: unknown;
  };
  const local = theirs.needs_split ? (theirs.splits ?? []) : plan.sources.map(() => theirs.local);
  if (local.length !== plan.sources.length)
    throw new Difference(`${plan.sources.length} sources, vLLM has ${local.length}`);
  for (const [index, source] of plan.sources.entries()) {
    same(`local table of source ${index}`, inTheirOrder(plan, expand(source.localTable)), local[index]);
    same(`remote table of source ${index}`, expand(source.remoteTable), theirs.remote);
  }
  const {
    local: _l,
    remote: _r,
    splits: _s,
    needs_split: _n,
    local_raw: _lr,
    remote_raw: _rr,
    ...rest
  } = theirs;
  same("summary", summary, rest);
  return expected;
};

function planOf(input: Readonly<Record<string, unknown>>): EngineTransferPlan {
  const read = fields(input);
  const side = (who: "local" | "remote"): RankGeometry => {
    const prefix = who === "local" ? "" : "remote_";
    const [lengths, strides] = [read.numbers(`${who}_block_lens`), read.numbers(`${who}_block_strides`)];
    return {
      tpRank: who === "local" ? read.number("tp_rank") : 0,
      tpSize: read.number(`${prefix}tp_size`),
      kernelBlockSize: read.number(`${prefix}block_size`),
      physicalBlocksPerLogical: read.number(`${prefix}ppl`),
      ...stateSpace(read, who),
      layout: "LBHNC",
      attentionBackend: "FLASH_ATTN",
      deviceId: read.number(`${prefix}device_id`),
      regions: read.numbers(`${who}_bases`).map((baseAddress, index) => ({
        name: `layer.${index}`,
        baseAddress,
        numBlocks: read.number(`${who}_num_blocks`),
        blockLengthBytes: lengths[index] ?? 0,
        blockStrideBytes: strides[index] ?? 0,
        groupId: read.numbers("region_group_ids")[index] ?? 0,
        memoryType: "VRAM",
      })),
    };
  };
  const remote = side("remote");
  const ratio = remote.tpSize / read.number("tp_size");
  const first = Math.floor(read.number("tp_rank") * ratio);
  return buildEngineTransferPlan({
    local: side("local"),
    remotes: Array.from({ length: Math.max(1, ratio) }, (_, index) => ({ ...remote, tpRank: first + index })),
    numKvHeads: read.number("kv_heads"),
    groups: read.kinds("groups"),
    // vLLM has only one form for different block sizes. It builds its tables with and without prefix caching; only its handshake checks that.
    form: "permute",
    prefixCaching: false,
  });
}

/** The vectors give the local convolution as the dimensions of its projections. The bytes per dimension follow from the remote's total. */
function stateSpace(
  read: ReturnType<typeof fields>,
  who: "local" | "remote",
): Pick<RankGeometry, "stateSpace"> {
  if (!read.boolean("mamba")) return {};
  const [convBytes = 0, recurrentBytes = 0] = read.numbers("remote_ssm_sizes");
  if (who === "remote") return { stateSpace: { convBytes, recurrentBytes } };
  const dims = read.numbers("local_conv_dims");
  const ofModel = dims.reduce((sum, dim) => sum + dim, 0) * read.number("tp_size");
  const bytesPerDim = (convBytes * read.number("remote_tp_size")) / ofModel;
  const convProjectionBytes = dims.map((dim) => dim * bytesPerDim);
  return {
    stateSpace: {
      convProjectionBytes,
      convBytes: convProjectionBytes.reduce((sum, bytes) => sum + bytes, 0),
      recurrentBytes: read.number("local_ssm_bytes"),
    },
  };
}

function expand(table: DescriptorTable): Descriptor[] {
  const expanded: Descriptor[] = [];
  for (let at = 0; at < table.rows.length; at += DESCRIPTOR_ROW) {
    const [address = 0, lengthBytes = 0, deviceId = 0, stride = 0, count = 0] = table.rows.subarray(
      at,
      at + DESCRIPTOR_ROW,
    );
    for (let index = 0; index < count; index++)
      expanded.push([address + index * stride, lengthBytes, deviceId]);
  }
  return expanded;
}

/** Descriptors by segment, block and part. */
function inTheirOrder(plan: EngineTransferPlan, ours: readonly Descriptor[]): (Descriptor | undefined)[] {
  const ordered: (Descriptor | undefined)[] = [];
  for (const [segment, { offset, count, blockStep, partStep }] of plan.localIndexing.entries()) {
    const parts = plan.segments[segment]?.localParts ?? 1;
    for (let index = 0; index < count; index++) {
      const part = index % parts;
      ordered.push(ours[offset + ((index - part) / parts) * blockStep + part * partStep]);
    }
  }
  return ordered;
}
