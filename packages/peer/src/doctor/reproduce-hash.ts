import { createHash } from "node:crypto";
import { type AgentMetadata, modelForms, pythonJson } from "@kv/protocol";

/** Factors of vLLM's compatibility hash by name, each with one or several values that may be the server's. */
export type FactorClues = Readonly<Record<string, readonly unknown[]>>;

export interface HashClues {
  readonly vllmVersion: string | undefined;
  /** Names under which the server knows its model, or the user does. */
  readonly models: readonly string[];
  readonly metadata: AgentMetadata;
  readonly tpSize: number;
  readonly cacheDtype: string | undefined;
  readonly transferMode: string | undefined;
  /** Factors that the user gave: nothing else is tried for them. */
  readonly given: Readonly<Record<string, unknown>>;
}

export interface ReproducedHash {
  /** The factors that give the hash; undefined when none of those tried does. */
  readonly factors: Readonly<Record<string, unknown>> | undefined;
  readonly tried: number;
}

/** About a second of one core. */
const MAX_TRIED = 60_000;
const HEAD_SIZES = [128, 64, 32, 256, 96, 80, 192, 160, 120, 112, 48, 16];
/** DeepSeek's latent vector, and the one with fp8 and scales. */
const LATENT_SIZES = [576, 656, 512];
const DTYPE_BYTES = { "torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4 } as const;

/** Finds the factors behind a digest: what the server tells of itself leaves few values for each. */
export function reproduceHash(hash: string, clues: HashClues): ReproducedHash {
  const { given } = clues;
  const models = [...new Set([...clues.models, ...clues.models.flatMap((name) => [...modelForms(name)])])];
  const versions = clues.vllmVersion === undefined ? ["0.33.0", "0.32.0"] : versionForms(clues.vllmVersion);
  const one = (name: string, others: readonly unknown[]) => (name in given ? [given[name]] : others);
  const cacheDtypes = [...new Set([clues.cacheDtype ?? "auto", "auto", "fp8", "fp8_e4m3", "bfloat16"])];
  const simple: FactorClues = {
    model: one("model", models),
    vllm_version: one("vllm_version", versions),
    nixl_connector_version: one("nixl_connector_version", [15, 14, 16, 13, 12, 11]),
    is_hma_enabled: one("is_hma_enabled", [true, false]),
    transfer_mode: one(
      "transfer_mode",
      clues.transferMode === undefined ? ["pull", "push"] : [clues.transferMode],
    ),
    attn_backend_name: one("attn_backend_name", [clues.metadata.attentionBackend]),
    speculative_config: one("speculative_config", [null]),
  };
  const digest = digester();
  let tried = 0;
  for (const shape of shapes(clues, cacheDtypes)) {
    for (const rest of combinations(Object.entries(simple))) {
      if (tried >= MAX_TRIED) return { factors: undefined, tried };
      tried += 1;
      const factors = { ...shape, ...rest };
      if (digest(factors) === hash) return { factors, tried };
    }
  }
  return { factors: undefined, tried };
}

/** As `compatibilityHash`, for thousands of sets whose values repeat: each is written as Python writes it once. */
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
    return createHash("sha256")
      .update(`{${entries.join(", ")}}`, "utf8")
      .digest("hex");
  };
}

/** `0.33.0+cpu` is hashed with what stands behind the plus, or without, as the build has it. */
function versionForms(version: string): string[] {
  const bare = version.replace(/\+.*$/, "");
  return [...new Set([version, bare, `${bare}+cpu`])];
}

/** Values that belong together: a block's length is heads · content · tokens · bytes of the cache's type. */
function* shapes(
  { metadata, tpSize, given }: HashClues,
  cacheDtypes: readonly string[],
): Generator<Record<string, unknown>> {
  const seen = new Set<string>();
  const regions = metadata.baseAddresses.length;
  // One region per layer as a rule; K and V apart, two.
  const layerCounts = [regions, ...(regions % 2 === 0 ? [regions / 2] : [])];
  const blockBytes = metadata.blockLengthsBytes[0] ?? 0;
  for (const [dtype, dtypeBytes] of Object.entries(DTYPE_BYTES)) {
    for (const cacheDtype of cacheDtypes) {
      const bytes = cacheDtype === "auto" ? dtypeBytes : cacheDtype.startsWith("fp8") ? 1 : 2;
      const perToken = blockBytes / metadata.blockSize / bytes;
      if (!Number.isInteger(perToken)) continue;
      for (const layers of layerCounts) {
        for (const [heads, size] of headsAndSizes(perToken, tpSize)) {
          const shape = {
            num_kv_heads: heads,
            head_size: size,
            num_hidden_layers: layers,
            dtype,
            cache_dtype: cacheDtype,
            ...pick(given, ["num_kv_heads", "head_size", "num_hidden_layers", "dtype", "cache_dtype"]),
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
    // Packed K and V, or one of them in a region of its own.
    for (const content of [2 * size, size]) {
      const local = perToken / content;
      if (!Number.isInteger(local) || local < 1) continue;
      // With more ranks than heads, ranks hold copies.
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
