/** Separates a cache's name from the number of its segment. */
const MARK = " #";

/**
 * vLLM registers a region per segment of a cache whose blocks are not contiguous in memory (one
 * segment per head in LHBNC; separate K and V), all under the cache's name. Plans need unique
 * names: the second segment is "name #2", and so on.
 */
export function numberSegments(names: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return names.map((name) => {
    const number = (seen.get(name) ?? 0) + 1;
    seen.set(name, number);
    return number === 1 ? name : `${name}${MARK}${number}`;
  });
}

/**
 * Maps segment names back to vLLM's names. A number is removed only if the cache's first segment
 * came before it.
 */
export function cachesOfSegments(names: readonly string[]): string[] {
  const known = new Set(names);
  return names.map((name) => {
    const cache = name.slice(0, Math.max(0, name.lastIndexOf(MARK)));
    const number = name.slice(cache.length + MARK.length);
    return known.has(cache) && /^[1-9]\d*$/.test(number) ? cache : name;
  });
}
