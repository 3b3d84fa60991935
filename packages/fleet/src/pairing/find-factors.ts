import { searchHashFactors } from "@kv/protocol";
import { type EngineFacts, modeIn } from "./engine-facts.js";

/** Facts whose factors were searched for. */
const searched = new WeakSet<EngineFacts>();

/** Whether the factors of an engine's hash are not known and were not searched for. */
export function mayFindFactors(facts: EngineFacts): boolean {
  return facts.factors === undefined && !searched.has(facts);
}

/** Searches the factors of an engine's hash, in steps between which requests are served. Undefined where none give the hash, or after an abort. */
export async function findFactors(facts: EngineFacts, signal: AbortSignal): Promise<EngineFacts | undefined> {
  const search = searchHashFactors(facts.compatibilityHash, {
    vllmVersion: facts.vllmVersion,
    models: facts.models,
    metadata: facts.metadata,
    tpSize: facts.tpSize ?? 1,
    cacheDtype: undefined,
    transferMode: facts.mode,
    knownFactors: {},
  });
  let step = search.next();
  for (; step.done !== true; step = search.next()) {
    await new Promise((resolve) => setImmediate(resolve));
    if (signal.aborted) return undefined;
  }
  searched.add(facts);
  const { factors } = step.value;
  return factors === undefined ? undefined : { ...facts, factors, mode: modeIn(factors) ?? facts.mode };
}
