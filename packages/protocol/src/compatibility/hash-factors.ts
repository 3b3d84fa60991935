import type { AgentMetadata } from "../handshake/agent-metadata.js";
import {
  describedVersion,
  NEWEST_VLLM_VERSION,
  VLLM_VERSIONS,
  type VllmVersion,
  vllmWire,
} from "../versions/vllm-wire.js";
import { sha256Hex } from "./compatibility-hash.js";
import { modelForms } from "./factor-candidates.js";
import { pythonJson } from "./python-json.js";

/** Candidate values of each factor of vLLM's compatibility hash, by the factor's name. */
type Candidates = Readonly<Record<string, readonly unknown[]>>;

/** The factors of a hash, by vLLM's names; undefined when they are unknown. */
export type Factors = Readonly<Record<string, unknown>> | undefined;

/** What is known about the server that announced a hash. */
export interface HashClues {
  /** The server's version, such as "0.33.0"; undefined tries those of vLLM 0.32 and 0.33. */
  readonly vllmVersion: string | undefined;
  /** Names of the model. */
  readonly models: readonly string[];
  /** The metadata of rank (0, 0). */
  readonly metadata: AgentMetadata;
  /** The described versions whose metadata has the same fields, oldest first; the two newest where that is not known. */
  readonly versions?: readonly VllmVersion[] | undefined;
  /** Tensor-parallel size of the engine. */
  readonly tpSize: number;
  /** `cache_dtype` of the engine's cache config, where it is known. */
  readonly cacheDtype: string | undefined;
  /** "pull" or "push", where it is known. */
  readonly transferMode: string | undefined;
  /** Factors that the user gave; no other value is tried for them. */
  readonly knownFactors: Readonly<Record<string, unknown>>;
}

/** The result of a search for the factors of a hash. */
export interface HashSearch {
  /** The factors that have the hash; undefined when no tried combination has it. */
  readonly factors: Factors;
  /** Combinations that were tried. */
  readonly tried: number;
}

/** Takes about a second on one core. */
const MAX_TRIED = 60_000;
/** Combinations that are tried in one step. */
const STEP = 256;
const HEAD_SIZES = [128, 64, 32, 256, 96, 80, 192, 160, 120, 112, 48, 16];
/** The latent vector of DeepSeek models, without and with fp8 scales. */
const LATENT_SIZES = [576, 656, 512];
const DTYPE_BYTES = { "torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4 } as const;

/** Finds the factors of a compatibility hash by trying combinations of the values that the clues leave open; takes up to a second. */
export function findHashFactors(hash: string, clues: HashClues): HashSearch {
  const search = searchHashFactors(hash, clues);
  for (;;) {
    const step = search.next();
    if (step.done === true) return step.value;
  }
}

/** As `findHashFactors`, in steps of a few milliseconds: a caller that serves others waits between two steps. */
export function* searchHashFactors(hash: string, clues: HashClues): Generator<void, HashSearch> {
  const { knownFactors } = clues;
  const models = [...new Set([...clues.models, ...clues.models.flatMap((name) => [...modelForms(name)])])];
  const one = (name: string, others: readonly unknown[]) =>
    name in knownFactors ? [knownFactors[name]] : others;
  const cacheDtypes = [
    ...new Set([
      clues.cacheDtype ?? "auto",
      "auto",
      "fp8",
      "fp8_e4m3",
      "bfloat16",
      ...Object.keys(SIXTEENTHS),
    ]),
  ];
  const simple: Candidates = {
    model: one("model", models),
    is_hma_enabled: one("is_hma_enabled", [true, false]),
    transfer_mode: one(
      "transfer_mode",
      clues.transferMode === undefined ? ["pull", "push"] : [clues.transferMode],
    ),
    attn_backend_name: one("attn_backend_name", [clues.metadata.attentionBackend]),
    speculative_config: one("speculative_config", [null]),
    cross_layers_blocks: one("cross_layers_blocks", [false, true]),
  };
  const digest = digester();
  let tried = 0;
  for (const shape of shapes(clues, cacheDtypes)) {
    for (const { names, ...candidates } of releases(clues)) {
      const versions = Object.entries(candidates).map(([name, values]) => [name, one(name, values)] as const);
      const others = Object.entries(simple).filter(([name]) => names.includes(name));
      for (const rest of combinations([...versions, ...others])) {
        if (tried >= MAX_TRIED) return { factors: undefined, tried };
        tried += 1;
        if (tried % STEP === 0) yield;
        const factors = { ...shape, ...rest };
        if (digest(factors) === hash) return { factors, tried };
      }
    }
  }
  return { factors: undefined, tried };
}

/** Computes `compatibilityHash` for thousands of combinations: the JSON of each value is cached, because values repeat. */
function digester(): (factors: Readonly<Record<string, unknown>>) => string {
  const texts = new Map<string, Map<unknown, string>>();
  return (factors) => {
    const entries = Object.keys(factors)
      .sort()
      .map((name) => {
        const ofName = texts.get(name) ?? new Map<unknown, string>();
        texts.set(name, ofName);
        const value = factors[name];
        const text = ofName.get(value) ?? pythonJson({ [name]: value }).slice(1, -1);
        ofName.set(value, text);
        return text;
      });
    return sha256Hex(`{${entries.join(", ")}}`);
  };
}

/** The releases that the server may run, likeliest first: the names of their factors, and both version factors. */
function releases({ vllmVersion, versions = VLLM_VERSIONS.slice(-2) }: HashClues) {
  const described = vllmVersion === undefined ? undefined : describedVersion(vllmVersion);
  if (vllmVersion !== undefined && described === undefined) {
    const { connectorVersion } = NEWEST_VLLM_VERSION;
    const connectorVersions = [1, 2, 0, 3].map((more) => connectorVersion + more);
    return [release(NEWEST_VLLM_VERSION, versionForms(vllmVersion), connectorVersions)];
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

/** Depending on the build, vLLM hashes its version with or without the local part, such as `+cpu`. */
function versionForms(version: string): string[] {
  const bare = version.replace(/\+.*$/, "");
  return [...new Set([version, bare, `${bare}+cpu`])];
}

/** Sixteenths of a byte that an element takes with its share of the scales. */
const SIXTEENTHS: Readonly<Record<string, number>> = { nvfp4: 9 };

/** Combinations of the factors that determine the length of a block: heads × content × tokens × bytes per value. */
function* shapes(
  { metadata, tpSize, knownFactors }: HashClues,
  cacheDtypes: readonly string[],
): Generator<Record<string, unknown>> {
  const seen = new Set<string>();
  const regions = metadata.baseAddresses.length;
  // Usually one region per layer; two when K and V are in separate regions.
  const layerCounts = [regions, ...(regions % 2 === 0 ? [regions / 2] : [])];
  const blockBytes = metadata.blockLengthsBytes[0] ?? 0;
  for (const [dtype, dtypeBytes] of Object.entries(DTYPE_BYTES)) {
    for (const cacheDtype of cacheDtypes) {
      const sixteenths =
        SIXTEENTHS[cacheDtype] ??
        16 * (cacheDtype === "auto" ? dtypeBytes : cacheDtype.startsWith("fp8") ? 1 : 2);
      const perToken = (blockBytes * 16) / (metadata.blockSize * sixteenths);
      if (!Number.isInteger(perToken)) continue;
      for (const layers of layerCounts) {
        for (const [heads, size] of headsAndSizes(perToken, tpSize)) {
          const shape = {
            num_kv_heads: heads,
            head_size: size,
            num_hidden_layers: layers,
            dtype,
            cache_dtype: cacheDtype,
            ...pick(knownFactors, ["num_kv_heads", "head_size", "num_hidden_layers", "dtype", "cache_dtype"]),
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

function* headsAndSizes(perToken: number, tpSize: number): Generator<[heads: number, size: number]> {
  if (LATENT_SIZES.includes(perToken)) yield [1, perToken];
  for (const size of HEAD_SIZES) {
    // K and V packed in one region, or in separate regions.
    for (const content of [2 * size, size]) {
      const local = perToken / content;
      if (!Number.isInteger(local) || local < 1) continue;
      // When there are more ranks than heads, several ranks hold the same head.
      for (let share = tpSize; share >= 1; share--) if (tpSize % share === 0) yield [local * share, size];
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

function pick(from: Readonly<Record<string, unknown>>, names: readonly string[]): Record<string, unknown> {
  return Object.fromEntries(names.filter((name) => name in from).map((name) => [name, from[name]]));
}
