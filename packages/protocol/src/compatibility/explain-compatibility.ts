import { VLLM_VERSIONS, type VllmVersion, vllmWire } from "../versions/vllm-wire.js";
import {
  compareFactors,
  compatibilityHash,
  digester,
  type FactorDifference,
} from "./compatibility-hash.js";
import {
  COMMON_CANDIDATES,
  type FactorCandidates,
  modelForms,
  SINGLE_CANDIDATES,
  speculativeCandidates,
} from "./factor-candidates.js";
import { pythonJson } from "./python-json.js";

/** Hashing these takes tens of milliseconds of the event loop, once per refused handshake. */
const MAX_TRIED = 4000;

type Factors = Readonly<Record<string, unknown>>;

/** Why the compatibility hashes of two engines differ. */
export interface CompatibilityExplanation {
  /**
   * `compared`: the peer sent its factors. `guessed`: its hash fits our factors with these changes.
   * `unknown`: nothing fits its hash. `inconsistent`: its own factors do not.
   */
  readonly how: "equal" | "compared" | "guessed" | "unknown" | "inconsistent";
  /** Empty for `equal` and `unknown`. */
  readonly differences: readonly FactorDifference[];
  readonly tried: number;
  readonly text: string;
}

/**
 * Explains which factors differ: compares those that the peer sent, or guesses from its hash, all
 * that vLLM sends. Guesses are our factors as each described release has them, then up to three
 * changes from `candidates` and common values; at most 4,000 combinations.
 */
export function explainCompatibility(
  ours: Factors,
  theirs: { readonly hash: string; readonly factors?: Factors },
  candidates: FactorCandidates = {},
): CompatibilityExplanation {
  if (compatibilityHash(ours) === theirs.hash) {
    return { how: "equal", differences: [], tried: 1, text: "the compatibility factors are equal" };
  }
  return theirs.factors === undefined
    ? search(ours, theirs.hash, candidates)
    : compareSent(ours, theirs.hash, theirs.factors);
}

function compareSent(ours: Factors, hash: string, factors: Factors): CompatibilityExplanation {
  const differences = compareFactors(ours, factors);
  const differ = differences.length === 0 ? "none" : list(differences);
  if (compatibilityHash(factors) === hash) {
    return {
      how: "compared",
      differences,
      tried: 0,
      text: `different compatibility factors: ${differ}`,
    };
  }
  const text = `the peer's hash ${hash.slice(0, 16)}… is not the hash of the factors that it sent; of these factors, different from ours: ${differ}`;
  return { how: "inconsistent", differences, tried: 0, text };
}

function search(
  ours: Factors,
  hash: string,
  candidates: FactorCandidates,
): CompatibilityExplanation {
  const releases = VLLM_VERSIONS.flatMap((version) => asRelease(ours, version));
  const release = releases.findIndex((factors) => compatibilityHash(factors) === hash);
  if (release >= 0) return guessed(ours, releases[release] ?? ours, release + 1);
  const common = optionsOf(ours, [candidates, COMMON_CANDIDATES]);
  const digest = digester();
  let tried = releases.length;
  const find = (options: Options, changes: number, limit: number): Factors | undefined => {
    for (const change of changesOf(options, changes)) {
      if (tried >= limit) return undefined;
      tried += 1;
      if (digest({ ...ours, ...change }) === hash) return change;
    }
    return undefined;
  };

  let limit = MAX_TRIED;
  let found = find(common, 1, limit);
  // Too many values to combine: one factor changes at a time, outside the limit.
  const tries = found === undefined && tried < limit;
  const wide = { ...SINGLE_CANDIDATES, speculative_config: speculativeCandidates(ours) };
  const single = tries ? optionsOf(ours, [wide]) : [];
  const before = tried;
  found ??= find(single, 1, before + MAX_TRIED);
  limit += tried - before;
  found ??= find(common, 2, limit) ?? find(common, 3, limit);
  if (found !== undefined) return guessed(ours, { ...ours, ...found }, tried);
  const combined = common.map(({ factor }) => factor);
  const alone = single.map(({ factor }) => factor).filter((factor) => !combined.includes(factor));
  const left = Object.keys(ours).filter(
    (factor) => !combined.includes(factor) && !alone.includes(factor),
  );
  const ofAlone = alone.length === 0 ? "" : `, nor of ${alone.join(", ")} alone,`;
  const gaveUp = tried >= limit ? "; the search ended there" : "";
  const text = `the peer sent only a hash, ${hash.slice(0, 16)}…, and none of ${tried} combinations of other values of ${combined.join(
    ", ",
  )}${ofAlone} gives it${gaveUp}; not tried: other values of ${left.join(", ") || "no factor"}. Ours are ${pythonJson(ours)}`;
  return { how: "unknown", differences: [], tried, text };
}

function* changesOf(options: Options, changes: number, from = 0): Generator<Factors> {
  for (const [at, { factor, values }] of options.entries()) {
    if (at < from) continue;
    for (const value of values) {
      if (changes === 1) yield { [factor]: value };
      else
        for (const more of changesOf(options, changes - 1, at + 1))
          yield { [factor]: value, ...more };
    }
  }
}

function guessed(ours: Factors, theirs: Factors, tried: number): CompatibilityExplanation {
  const differences = compareFactors(ours, theirs);
  const text = `the peer sent only a hash; it is the hash of our factors with this change: ${list(differences)} (guessed, ${tried} combinations tried)`;
  return { how: "guessed", differences, tried, text };
}

/**
 * Takes on the release's versions and factors, with both values of one that only older releases
 * have.
 */
function asRelease(ours: Factors, version: VllmVersion): Factors[] {
  const has = (release: VllmVersion, name: string) =>
    name in vllmWire(release)["compatibility hash"];
  const kept = Object.entries(ours).filter(
    ([name]) => has(version, name) || !VLLM_VERSIONS.some((each) => has(each, name)),
  );
  const factors = {
    ...Object.fromEntries(kept),
    vllm_version: version.version,
    nixl_connector_version: version.connectorVersion,
  };
  if (!has(version, "cross_layers_blocks")) return [factors];
  return [false, true].map((value) => ({ ...factors, cross_layers_blocks: value }));
}

type Options = readonly { readonly factor: string; readonly values: readonly unknown[] }[];

function optionsOf(ours: Factors, candidates: readonly FactorCandidates[]): Options {
  return Object.keys(ours)
    .map((factor) => {
      const own = ours[factor];
      const forms = factor === "model" && typeof own === "string" ? modelForms(own) : [];
      const seen = new Set([pythonJson(own)]);
      const [given = {}, ...more] = candidates;
      const values = [
        ...(given[factor] ?? []),
        ...forms,
        ...more.flatMap((each) => each[factor] ?? []),
      ];
      const fresh = values.filter((value) => {
        const text = pythonJson(value);
        return !seen.has(text) && seen.add(text);
      });
      return { factor, values: fresh };
    })
    .filter(({ values }) => values.length > 0);
}

const list = (differences: readonly FactorDifference[]) =>
  differences
    .map(
      ({ factor, ours, theirs }) => `${factor} is ${short(ours)} here and ${short(theirs)} there`,
    )
    .join("; ");

/** A peer's value may have any length. */
function short(value: unknown): string {
  if (value === undefined) return "no factor";
  const text = pythonJson(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
