import { atOnce, isMap } from "../encoding/messages.js";
import type { AgentMetadata } from "../handshake/agent-metadata.js";
import {
  describedVersion,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  type VllmVersion,
  vllmWire,
} from "../versions/vllm-wire.js";
import { digester } from "./compatibility-hash.js";
import { modelForms, PROPOSED_FACTORS, speculativeForms } from "./factor-candidates.js";

type Candidates = Readonly<Record<string, readonly unknown[]>>;

/** Factors of a hash, by vLLM's names; undefined when unknown. */
export type Factors = Readonly<Record<string, unknown>> | undefined;

/** What is known about the server that announced a hash. */
export interface HashClues {
  /** A version such as "0.33.0"; undefined tries vLLM 0.32 and 0.33. */
  readonly vllmVersion: string | undefined;
  readonly models: readonly string[];
  readonly metadata: AgentMetadata;
  /**
   * Described versions with the same metadata fields, oldest first; the two newest where unknown.
   */
  readonly versions?: readonly VllmVersion[] | undefined;
  readonly tpSize: number;
  readonly cacheDtype: string | undefined;
  readonly transferMode: string | undefined;
  /**
   * Factors from the user, as lists where the servers of a pair may differ. Nothing else is tried
   * for them, but null for `speculative_config`, which one server may lack.
   */
  readonly knownFactors: Readonly<Record<string, unknown>>;
}

/** Result of a search for the factors of a hash. */
export interface HashSearch {
  /** Undefined when no combination has the hash. */
  readonly factors: Factors;
  readonly tried: number;
}

/** Takes about a second on one core. */
const MAX_TRIED = 60_000;
const SHAPE_FACTORS = ["num_kv_heads", "head_size", "num_hidden_layers", "dtype", "cache_dtype"];
const STEP = 256;
const HEAD_SIZES = [128, 64, 32, 256, 96, 80, 192, 160, 120, 112, 48, 16];
/** The latent vectors of DeepSeek models. */
const LATENT_SIZES = [576, 512];
/** `num_key_value_heads` of MLA models, which the hash has although their cache has one head. */
const LATENT_HEADS = [1, 128, 64, 16, 32, 96, 40, 20, 8, 4];
const DTYPE_BYTES = { "torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4 } as const;

/**
 * Finds the factors of a compatibility hash by trying what the clues leave open, for up to a
 * second.
 */
export function findHashFactors(hash: string, clues: HashClues): HashSearch {
  return atOnce(searchHashFactors(hash, clues));
}

/**
 * As `findHashFactors`, in steps of a few milliseconds: the caller can serve others between them.
 */
export function* searchHashFactors(hash: string, clues: HashClues): Generator<void, HashSearch> {
  const { knownFactors } = clues;
  const models = [
    ...new Set([...clues.models, ...clues.models.flatMap((name) => [...modelForms(name)])]),
  ];
  const one = (name: string, others: readonly unknown[]) =>
    name in knownFactors ? [knownFactors[name]].flat() : others;
  const simple: Candidates = {
    model: one("model", models),
    is_hma_enabled: one("is_hma_enabled", [true, false]),
    transfer_mode: one(
      "transfer_mode",
      clues.transferMode === undefined ? ["pull", "push"] : [clues.transferMode],
    ),
    attn_backend_name: one("attn_backend_name", [clues.metadata.attentionBackend]),
    cross_layers_blocks: one("cross_layers_blocks", [false, true]),
    ...Object.fromEntries(PROPOSED_FACTORS.map((name) => [name, one(name, [null])])),
  };
  const digest = digester();
  const speculation = speculationOf(knownFactors);
  let tried = 0;
  for (const range of RANGES) {
    for (const shape of shapes(clues, range)) {
      for (const { names, ...candidates } of releases(clues)) {
        const versions = Object.entries(candidates).map(
          ([name, values]) => [name, one(name, values)] as const,
        );
        const others = Object.entries(simple).filter(([name]) => names.includes(name));
        for (const rest of combinations([...versions, ...others])) {
          const speculative = names.includes("speculative_config")
            ? speculation({ ...shape, ...rest }, range)
            : [{}];
          for (const part of speculative) {
            if (tried >= MAX_TRIED) return { factors: undefined, tried };
            tried += 1;
            if (tried % STEP === 0) yield;
            const factors = { ...shape, ...rest, ...part };
            if (digest(factors) === hash) return { factors, tried };
          }
        }
      }
    }
  }
  return { factors: undefined, tried };
}

/** Values besides the likely ones, range by range: together they are too many combinations. */
interface Range {
  readonly allCacheDtypes?: boolean;
  readonly allLayers?: boolean;
  readonly mtp?: boolean;
}

const RANGES: readonly Range[] = [
  {},
  { mtp: true },
  { allCacheDtypes: true },
  { allLayers: true },
  { allLayers: true, mtp: true },
];

/** Equal factors give the same object, whose text the digester caches. */
function speculationOf(known: Readonly<Record<string, unknown>>) {
  const cached = new Map<string, readonly { speculative_config: unknown }[]>();
  return ({ model, cache_dtype }: Readonly<Record<string, unknown>>, { mtp = false }: Range) => {
    const key = JSON.stringify([model, cache_dtype, mtp]);
    const before = cached.get(key);
    if (before !== undefined) return before;
    const given = known["speculative_config"];
    const own = mtp ? [{ method: "mtp", model }] : [];
    const settings = given === undefined ? own : isMap(given) ? [given] : [];
    const forms = settings.flatMap((each) => speculativeForms(each, String(cache_dtype)));
    const values = [null, ...forms].map((speculative_config) => ({ speculative_config }));
    cached.set(key, values);
    return values;
  };
}

/** Likeliest first. */
function releases({ vllmVersion, versions = VLLM_VERSIONS.slice(-2) }: HashClues) {
  const described = vllmVersion === undefined ? undefined : describedVersion(vllmVersion);
  if (vllmVersion !== undefined && described === undefined) {
    const { connectorVersion } = NEWEST_VLLM_VERSION;
    const connectorVersions = [1, 2, 0, 3].map((more) => connectorVersion + more);
    const newest = release(NEWEST_VLLM_VERSION, versionForms(vllmVersion), connectorVersions);
    return [newest, { ...newest, names: [...newest.names, ...PROPOSED_FACTORS] }];
  }
  const fitting = versions.length > 0 ? [...versions].reverse() : [NEWEST_VLLM_VERSION];
  return (described === undefined ? fitting : [described]).map((each) =>
    release(
      each,
      versionForms(vllmVersion ?? each.version),
      [0, 1, 2].map((more) => each.connectorVersion + more),
    ),
  );
}

function release(
  version: VllmVersion,
  versionTexts: readonly string[],
  connectorVersions: readonly number[],
) {
  const names = Object.keys(vllmWire(version)["compatibility hash"]);
  return { names, vllm_version: versionTexts, nixl_connector_version: connectorVersions };
}

/** Builds of vLLM hash its version with or without the local part, such as `+cpu`. */
function versionForms(version: string): string[] {
  const bare = version.replace(/\+.*$/, "");
  return [...new Set([version, bare, `${bare}+cpu`])];
}

/** Bytes of a head with its scales (vLLM 0.33: `customize_spec`). */
const ELEMENTS: Readonly<Record<string, (size: number) => number>> = {
  nvfp4: (size) => (size * 9) / 16,
  int8_per_token_head: (size) => size + 4,
  fp8_per_token_head: (size) => size + 4,
  int4_per_token_head: (size) => size / 2 + 4,
};
/** Bytes of a token's latent with its scales. */
const LATENT_BYTES: Readonly<
  Record<string, readonly (readonly [bytes: number, headSize: number])[]>
> = {
  fp8_ds_mla: [
    [656, 576],
    [584, 512],
  ],
};

/** A block's length is heads × content × tokens × bytes per value. */
function* shapes(
  { metadata, tpSize, knownFactors, cacheDtype: announced = "auto" }: HashClues,
  { allCacheDtypes = false, allLayers = false }: Range,
): Generator<Record<string, unknown>> {
  const seen = new Set<string>();
  const known = pick(knownFactors, SHAPE_FACTORS);
  if (Object.keys(known).length === SHAPE_FACTORS.length) return yield known;
  const blockBytes = metadata.blockLengthsBytes[0] ?? 0;
  const layerCounts = "num_hidden_layers" in known ? [0] : layersOf(metadata, allLayers);
  const more = allCacheDtypes
    ? ["float16", "fp8_e5m2", ...Object.keys(ELEMENTS), ...Object.keys(LATENT_BYTES)]
    : [];
  const cacheDtypes =
    "cache_dtype" in known
      ? [String(known["cache_dtype"])]
      : [...new Set([announced, "auto", "fp8", "fp8_e4m3", "bfloat16", "nvfp4", ...more])];
  const isMla = metadata.attentionBackend.includes("MLA");
  const sizes = typeof known["head_size"] === "number" ? [known["head_size"]] : HEAD_SIZES;
  const tokenBytes = blockBytes / metadata.blockSize;
  for (const [dtype, dtypeBytes] of Object.entries(DTYPE_BYTES)) {
    for (const cacheDtype of cacheDtypes) {
      for (const layers of layerCounts) {
        const cell = { tokenBytes, cacheDtype, dtypeBytes };
        for (const [heads, size] of headsAndSizes(cell, tpSize, isMla, sizes)) {
          const shape = {
            num_kv_heads: heads,
            head_size: size,
            num_hidden_layers: layers,
            dtype,
            cache_dtype: cacheDtype,
            ...known,
          };
          const key = JSON.stringify(shape);
          if (seen.has(key)) continue;
          seen.add(key);
          yield shape;
        }
      }
    }
  }
}

/** Likeliest first. */
function layersOf(
  { baseAddresses, regionNames = [], regionGroupIds = [] }: AgentMetadata,
  all: boolean,
): number[] {
  const regions = baseAddresses.length;
  const numbers = regionNames.map((name) => Number(/(?:^|\.)(\d+)\./.exec(`${name}.`)?.[1] ?? -1));
  const named = 1 + Math.max(-1, ...numbers);
  const groups = 1 + Math.max(0, ...regionGroupIds);
  const others = [
    // Some layers have no region, or share one.
    named,
    // The last layer is MTP's or a draft model's.
    named - 1,
    regions - 1,
    regions * groups,
  ];
  // One region per layer, or K and V in separate ones.
  return [regions, regions / 2, ...(all ? others : [])].filter(
    (count, at, all) => Number.isInteger(count) && count > 0 && all.indexOf(count) === at,
  );
}

function* headsAndSizes(
  {
    tokenBytes,
    cacheDtype,
    dtypeBytes,
  }: Readonly<{ tokenBytes: number; cacheDtype: string; dtypeBytes: number }>,
  tpSize: number,
  isMla: boolean,
  sizes: readonly number[],
): Generator<[heads: number, size: number]> {
  const latentHeads = isMla ? LATENT_HEADS : [1];
  for (const [bytes, size] of LATENT_BYTES[cacheDtype] ?? [])
    if (bytes === tokenBytes) for (const heads of latentHeads) yield [heads, size];
  const elementBytes = cacheDtype === "auto" ? dtypeBytes : cacheDtype.startsWith("fp8") ? 1 : 2;
  const bytesOf = ELEMENTS[cacheDtype] ?? ((size: number) => size * elementBytes);
  for (const size of LATENT_SIZES)
    if (bytesOf(size) === tokenBytes) for (const heads of latentHeads) yield [heads, size];
  for (const size of sizes) {
    for (const content of [2 * bytesOf(size), bytesOf(size)]) {
      const local = tokenBytes / content;
      if (!Number.isInteger(local) || local < 1) continue;
      // Where ranks outnumber heads, several hold the same one.
      for (let share = tpSize; share >= 1; share--)
        if (tpSize % share === 0) yield [local * share, size];
    }
  }
}

function* combinations(
  factors: readonly (readonly [string, readonly unknown[]])[],
): Generator<Record<string, unknown>> {
  const [first, ...rest] = factors;
  if (first === undefined) {
    yield {};
    return;
  }
  for (const value of first[1]) {
    for (const others of combinations(rest)) yield { [first[0]]: value, ...others };
  }
}

function pick(
  from: Readonly<Record<string, unknown>>,
  names: readonly string[],
): Record<string, unknown> {
  return Object.fromEntries(names.filter((name) => name in from).map((name) => [name, from[name]]));
}
