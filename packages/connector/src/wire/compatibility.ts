import { COMMON_CANDIDATES, type FactorCandidates, modelForms } from "./compatibility-candidates.js";
import {
  compareFactors,
  compatibilityHash,
  type FactorDifference,
  sha256Hex,
} from "./compatibility-factors.js";
import { byCodePoint, pythonJson } from "./python-json.js";

/** Combinations that are hashed at most: some tens of milliseconds of the event loop, once per refused handshake. */
const MAX_TRIED = 4000;

type Factors = Readonly<Record<string, unknown>>;

export interface CompatibilityExplanation {
  /**
   * `equal`: the digests agree. `told`: the peer sent its factors. `found`: its digest is that of our factors with these changes; a guess that
   * a SHA-256 confirms. `unknown`: no candidate fits. `untrue`: the factors that the peer sent do not give the digest that it sent.
   */
  readonly how: "equal" | "told" | "found" | "unknown" | "untrue";
  readonly differences: readonly FactorDifference[];
  /** Digests that were compared with the peer's. */
  readonly tried: number;
  /** One sentence for an error message. */
  readonly text: string;
}

/**
 * Says which factor differs. With the peer's factors it is a comparison; with only its digest, which is all that vLLM sends, a search
 * over changes of one, two and three factors among `candidates` and what is common in the field.
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
    ? searched(ours, theirs.hash, candidates)
    : told(ours, theirs.hash, theirs.factors);
}

function told(ours: Factors, hash: string, factors: Factors): CompatibilityExplanation {
  const differences = compareFactors(ours, factors);
  const differ = differences.length === 0 ? "none" : list(differences);
  if (compatibilityHash(factors) === hash) {
    return {
      how: "told",
      differences,
      tried: 0,
      text: `different compatibility factors: ${differ}`,
    };
  }
  const text = `the peer's digest ${hash.slice(0, 16)}… is not that of the factors that it sent; of those, different from ours: ${differ}`;
  return { how: "untrue", differences, tried: 0, text };
}

function searched(ours: Factors, hash: string, candidates: FactorCandidates): CompatibilityExplanation {
  const options = optionsOf(ours, candidates);
  // The texts of all entries in Python's order, changed in place: writing all factors anew for each combination takes ten times as long.
  const factors = Object.keys(ours).sort(byCodePoint);
  const entry = (factor: string, value: unknown) => pythonJson({ [factor]: value }).slice(1, -1);
  const entries = factors.map((factor) => entry(factor, ours[factor]));
  let tried = 0;

  /** Changes `changes` factors, none of them before `from`; the combination that fits. */
  function search(from: number, changes: number): Factors | undefined {
    for (const [i, { factor, values }] of options.entries()) {
      if (i < from) continue;
      const at = factors.indexOf(factor);
      const own = entries[at] ?? "";
      for (const value of values) {
        if (tried >= MAX_TRIED) return undefined;
        entries[at] = entry(factor, value);
        let found: Factors | undefined;
        if (changes > 1) found = search(i + 1, changes - 1);
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

  for (const changes of [1, 2, 3]) {
    const found = search(0, changes);
    if (found === undefined) continue;
    const differences = compareFactors(ours, { ...ours, ...found });
    const text = `the peer sent only a digest; it is that of our factors but for this: ${list(differences)} (guessed, ${tried} combinations tried)`;
    return { how: "found", differences, tried, text };
  }
  const searchedFor = options.map(({ factor }) => factor);
  const left = Object.keys(ours).filter((factor) => !searchedFor.includes(factor));
  const gaveUp = tried >= MAX_TRIED ? ", where the search ended" : "";
  const text = `the peer sent only a digest, ${hash.slice(0, 16)}…, and none of ${tried} combinations of other values of ${searchedFor.join(
    ", ",
  )} gives it${gaveUp}; not tried: other values of ${left.join(", ") || "no factor"}. Ours are ${pythonJson(ours)}`;
  return { how: "unknown", differences: [], tried, text };
}

/** The values to try for each factor, ours left out, each once; what the caller knows goes first. */
function optionsOf(ours: Factors, candidates: FactorCandidates): { factor: string; values: unknown[] }[] {
  return Object.keys(ours)
    .map((factor) => {
      const own = ours[factor];
      const forms = factor === "model" && typeof own === "string" ? modelForms(own) : [];
      const seen = new Set([pythonJson(own)]);
      const values = [...(candidates[factor] ?? []), ...forms, ...(COMMON_CANDIDATES[factor] ?? [])];
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
    .map(({ factor, ours, theirs }) => `${factor} is ${short(ours)} here and ${short(theirs)} there`)
    .join("; ");

/** A peer's factor may be of any length. */
function short(value: unknown): string {
  const text = pythonJson(value);
  return text.length > 200 ? `${text.slice(0, 200)}…` : text;
}
