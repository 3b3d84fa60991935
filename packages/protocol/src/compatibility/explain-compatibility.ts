import { VLLM_VERSIONS, type VllmVersion, vllmWire } from "../versions/vllm-wire.js";
import {
  compareFactors,
  compatibilityHash,
  type FactorDifference,
  sha256Hex,
} from "./compatibility-hash.js";
import {
  COMMON_CANDIDATES,
  type FactorCandidates,
  modelForms,
  SINGLE_CANDIDATES,
  speculativeCandidates,
} from "./factor-candidates.js";
import { byCodePoint, pythonJson } from "./python-json.js";

/**
 * Most combinations that are hashed. They take some tens of milliseconds of the event loop, once
 * per refused handshake.
 */
const MAX_TRIED = 4000;

type Factors = Readonly<Record<string, unknown>>;

/** Why the compatibility hashes of two engines differ. */
export interface CompatibilityExplanation {
  /**
   * `equal`: the hashes are equal. `compared`: the peer sent its factors. `guessed`: the peer sent
   * only the hash, and it is the hash of our factors with these changes. `unknown`: no candidate
   * gives the peer's hash. `inconsistent`: the factors that the peer sent do not give the hash that
   * it sent.
   */
  readonly how: "equal" | "compared" | "guessed" | "unknown" | "inconsistent";
  /** The factors that differ, with both values. Empty for `equal` and `unknown`. */
  readonly differences: readonly FactorDifference[];
  /** Number of hashes that were compared with the peer's. */
  readonly tried: number;
  readonly text: string;
}

/**
 * Explains which factor differs. When the peer sent its factors, they are compared. vLLM sends only
 * the hash: then our factors as each described release of vLLM would have them are tried, and
 * changes of one, two and three factors, from `candidates` first and from common values after them;
 * at most 4,000 combinations.
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
  // The texts of all entries in Python's order, changed in place: formatting all factors for each
  // combination takes ten times as long.
  const factors = Object.keys(ours).sort(byCodePoint);
  const entry = (factor: string, value: unknown) => pythonJson({ [factor]: value }).slice(1, -1);
  const entries = factors.map((factor) => entry(factor, ours[factor]));
  let tried = releases.length;

  /**
   * Tries changes of `changes` factors, none before index `from`, until `limit` have been tried.
   * Returns the combination that gives the peer's hash.
   */
  function tryChanges(
    options: Options,
    changes: number,
    limit: number,
    from = 0,
  ): Factors | undefined {
    for (const [i, { factor, values }] of options.entries()) {
      if (i < from) continue;
      const at = factors.indexOf(factor);
      const own = entries[at] ?? "";
      for (const value of values) {
        if (tried >= limit) return undefined;
        entries[at] = entry(factor, value);
        let found: Factors | undefined;
        if (changes > 1) found = tryChanges(options, changes - 1, limit, i + 1);
        else {
          tried += 1;
          if (sha256Hex(`{${entries.join(", ")}}`) === hash) found = {};
        }
        if (found !== undefined) return { [factor]: value, ...found };
      }
      entries[at] = own;
    }
    return undefined;
  }

  let limit = MAX_TRIED;
  let found = tryChanges(common, 1, limit);
  // Values that are too many to be combined, of one factor at a time. They do not count for the
  // limit.
  const tries = found === undefined && tried < limit;
  const wide = { ...SINGLE_CANDIDATES, speculative_config: speculativeCandidates(ours) };
  const single = tries ? optionsOf(ours, [wide]) : [];
  const before = tried;
  found ??= tryChanges(single, 1, before + MAX_TRIED);
  limit += tried - before;
  found ??= tryChanges(common, 2, limit) ?? tryChanges(common, 3, limit);
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

function guessed(ours: Factors, theirs: Factors, tried: number): CompatibilityExplanation {
  const differences = compareFactors(ours, theirs);
  const text = `the peer sent only a hash; it is the hash of our factors with this change: ${list(differences)} (guessed, ${tried} combinations tried)`;
  return { how: "guessed", differences, tried, text };
}

/**
 * Our factors as a release of vLLM has them: its two versions, without the factors that it lacks
 * and with the one that only older releases have.
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

/**
 * The values to try for each factor, without ours and without repetitions; the caller's candidates
 * come first.
 */
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

/** Shortens a factor's value: a peer's may have any length. */
function short(value: unknown): string {
  if (value === undefined) return "no factor";
  const text = pythonJson(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
