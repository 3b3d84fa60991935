import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { KvError } from "@kv/interface";
import type { LearnedArchitecture } from "../../packages/kv-plan/src/model/architectures.js";
import {
  type CacheSpec,
  pageBytes,
  unpaddedPageBytes,
} from "../../packages/kv-plan/src/model/cache-spec.js";
import { parsePythonJson } from "../../packages/kv-plan/src/model/config-fields.js";
import { placeCaches } from "../../packages/kv-plan/src/model/kv-cache-tensors.js";
import {
  type CacheSettings,
  type ModelCaches,
  modelCaches,
} from "../../packages/kv-plan/src/model/model-caches.js";
import type { ChangedCase } from "./changed-config.js";
import { firstDifference, type Outcome } from "./outcome.js";
import type { ModelLine } from "./vector-file.js";

const POOL_BYTES = 2 ** 46;

/** What the CPU without a driver, or the device without memory, could not answer. */
const NOT_ASKED = /meta tensor|CUDA error|no answer in/;

/** Whether the answer is vLLM's own. */
export function wasAsked({ error }: ModelLine): boolean {
  return error === undefined || !NOT_ASKED.test(error);
}

/** Each case that is neither equal nor refused, in words. */
export function failuresOf(cases: readonly ChangedCase[]): readonly string[] {
  return cases.flatMap(({ line, changed, config }) => {
    const outcome = judgeModel(line, "", config);
    return outcome.kind === "failed"
      ? [
          `${line.config} ${JSON.stringify(line.draft ?? changed)} TP ${line.tp} ${line.kv_cache_dtype}: ${outcome.reason}`,
        ]
      : [];
  });
}

/**
 * A config lies in the folder `configs` beside the file, unless it is given. `learned`: instead of
 * the table's entry.
 */
export function judgeModel(
  line: ModelLine,
  file: string,
  given?: unknown,
  learned?: LearnedArchitecture,
): Outcome {
  if (!wasAsked(line)) return { kind: "passed", refused: "vLLM could not be asked without a GPU" };
  const config =
    given ?? parsePythonJson(readFileSync(join(dirname(file), "configs", line.config), "utf8"));
  let caches: ModelCaches;
  try {
    caches = modelCaches(line.config, config, settingsOf(line), learned);
  } catch (error) {
    if (!KvError.is(error))
      return {
        kind: "failed",
        reason: error instanceof Error ? (error.stack ?? "") : String(error),
      };
    if (error.code === "KV_PLAN_UNSUPPORTED" || line.error !== undefined)
      return { kind: "passed", refused: error.message };
    return { kind: "failed", reason: `refused as if the file were wrong: ${error.message}` };
  }
  if (line.error !== undefined)
    return { kind: "failed", reason: `vLLM refuses (${line.error}), we plan` };
  const difference = differenceOf(caches, line);
  return difference === undefined ? { kind: "passed" } : { kind: "failed", reason: difference };
}

export function settingsOf(line: ModelLine): CacheSettings {
  return {
    tpSize: line.tp,
    cacheDtype: line.kv_cache_dtype,
    prefixCaching: line.prefix_caching,
    draft: line.draft,
  };
}

function differenceOf(caches: ModelCaches, line: ModelLine): string | undefined {
  const layers = caches.layers.map(({ layer, spec, name }) => ({
    layer: numberIn(name) ?? layer,
    ...described(spec),
  }));
  const numBlocks = caches.bytesPerBlock === 0 ? 1 : Math.floor(POOL_BYTES / caches.bytesPerBlock);
  const order = new Map(caches.layers.map(({ name }, index) => [name, index]));
  const facts = {
    architecture: caches.architecture,
    resolved_dtype: caches.cacheDtype,
    model_dtype: caches.modelDtype,
    block_size: caches.blockSize,
    layout: caches.layout,
    // vLLM's line has it of hybrids only.
    ...(line["mamba_block_size"] === undefined ? {} : { mamba_block_size: caches.stateBlockSize }),
  };
  const ours = {
    facts,
    layers,
    groups: caches.groups.map((group) => ({
      members: group.layers.map(({ name }) => order.get(name)),
      block_size: group.blockSize,
      page_sizes: [...new Set(group.layers.map(({ spec }) => pageBytes(spec)))].sort(
        (a, b) => a - b,
      ),
    })),
    num_blocks: numBlocks,
    tensors: placeCaches(caches, numBlocks).map((tensor) => [
      tensor.layers.length,
      tensor.offsetBytes,
      tensor.layerStrideBytes,
      tensor.blockStrideBytes,
    ]),
  };
  return firstDifference(ours, expanded(line, facts), line.config);
}

function numberIn(name: string): number | undefined {
  const part = name.split(".").find((one) => /^\d+$/.test(one));
  return part === undefined ? undefined : Number(part);
}

/** With vLLM's names, without what says nothing of bytes, blocks or heads. */
function described(spec: CacheSpec): Readonly<Record<string, unknown>> {
  const padded =
    pageBytes(spec) === unpaddedPageBytes(spec) ? {} : { page_size_padded: pageBytes(spec) };
  const common = {
    class: spec.class,
    block_size: spec.blockSize,
    page_size_bytes: pageBytes(spec),
    ...padded,
  };
  if (spec.class === "MambaSpec")
    return { ...common, shapes: spec.shapes, dtypes: spec.dtypes, mamba_type: spec.mambaType };
  return {
    ...common,
    num_kv_heads: spec.numKvHeads,
    head_size: spec.headSize,
    head_size_v: spec.headSizeV,
    dtype: spec.dtype,
    ...optional("state_content_bytes", spec.contentBytes),
    ...optional("tokens_per_state", spec.tokensPerState),
    ...optional("sliding_window", spec.slidingWindow),
    ...optional("attention_chunk_size", spec.attentionChunkSize),
    ...optional("alignment", spec.alignment),
  };
}

const optional = (name: string, value: unknown) => (value === undefined ? {} : { [name]: value });

/** They say nothing of bytes, blocks or heads, or follow from others. */
const OTHER_SPEC_FIELDS: ReadonlySet<string> = new Set([
  "block_stride_alignment",
  "extra_retained_tokens",
  "is_draft",
  "max_tp_shards",
  "kv_quant_mode",
  "cache_dtype_str",
  "topk_buffer_width",
  "cache_role",
  "is_index_group_leader",
  "model_version",
  "mamba_cache_mode",
  "num_prefill_checkpoint_blocks",
  "num_speculative_blocks",
  "num_head_slots",
  "prefill_checkpoint_alignment",
]);

/** vLLM's line, counted out. */
function expanded(line: ModelLine, facts: object): unknown {
  const specs = line["specs"] as Readonly<Record<string, unknown>>[];
  const rows = line["layers"] as (readonly [number, number, number, number | null])[];
  const plain = specs.map((spec) => {
    const fields = Object.entries(spec).filter(([name]) => !OTHER_SPEC_FIELDS.has(name));
    const { state_content_bytes: content, num_head_slots: slots, num_kv_heads: heads } = spec;
    return {
      ...Object.fromEntries(fields),
      // vLLM counts slots of K and of V, we count heads.
      ...(slots === undefined
        ? {}
        : { state_content_bytes: (Number(content) * Number(slots)) / Number(heads) }),
      ...(spec["class"] === "MambaSpec" ? { mamba_type: spec["mamba_type"] ?? "MAMBA2" } : {}),
    };
  });
  const groups = line["groups"] as {
    members: [number, number, number][];
    block_size: number;
    page_sizes: number[];
  }[];
  return {
    facts: Object.fromEntries(Object.keys(facts).map((name) => [name, line[name]])),
    layers: rows.flatMap(([count, spec, , first]) =>
      Array.from({ length: count }, (_, index) => ({
        layer: (first ?? 0) + index,
        ...plain[spec],
      })),
    ),
    groups: groups.map(({ members, block_size, page_sizes }) => ({
      members: members.flatMap(([first, count, step]) =>
        Array.from({ length: count }, (_, index) => first + index * step),
      ),
      block_size,
      page_sizes,
    })),
    num_blocks: line["num_blocks_in_64_TiB"],
    tensors: line["tensors"],
  };
}
