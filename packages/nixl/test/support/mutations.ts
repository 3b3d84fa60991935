/**
 * Copies of `bytes` with one to four changes each: changed, removed and inserted bytes, truncation.
 * Deterministic for each seed.
 */
export function* mutations(bytes: Uint8Array, count: number, seed: number): Generator<Uint8Array> {
  let state = seed >>> 0;
  const below = (limit: number) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * limit);
  };
  for (let index = 0; index < count; index++) {
    let now = [...bytes];
    for (let change = 0; change <= below(4); change++) {
      const place = below(Math.max(1, now.length));
      const kind = below(8);
      if (kind < 5) now[place] = (now[place] ?? 0) ^ (1 + below(255));
      else if (kind === 5) now.splice(place, 1 + below(16));
      else if (kind === 6) now.splice(place, 0, below(256));
      else now = now.slice(0, place);
    }
    yield Uint8Array.from(now);
  }
}
