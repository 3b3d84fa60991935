/** Between a cache's name and the number of its segment. */
const MARK = " #";

/**
 * vLLM registers a region per segment of a cache whose blocks are not in one stretch of memory (a head each in LHBNC; K and V apart), all
 * under the cache's name. Plans want names that differ: the second is "name #2", and so on.
 */
export function numberSegments(names: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return names.map((name) => {
    const number = (seen.get(name) ?? 0) + 1;
    seen.set(name, number);
    return number === 1 ? name : `${name}${MARK}${number}`;
  });
}

/** The names as vLLM tells them. Only what follows a first segment is a number of one. */
export function cachesOfSegments(names: readonly string[]): string[] {
  const known = new Set(names);
  return names.map((name) => {
    const cache = name.slice(0, Math.max(0, name.lastIndexOf(MARK)));
    const number = name.slice(cache.length + MARK.length);
    return known.has(cache) && /^[1-9]\d*$/.test(number) ? cache : name;
  });
}
