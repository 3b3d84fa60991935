import type { Clock } from "@kv/interface";

/** Keys seen a while ago, so that what comes late or twice is known for what it is; bounded in time and in number. */
export interface Recent {
  add(key: string): void;
  has(key: string): boolean;
  readonly size: number;
  clear(): void;
}

export function createRecent({
  clock,
  rememberMs,
  most,
}: {
  clock: Clock;
  rememberMs: number;
  most: number;
}): Recent {
  // In order of arrival, so that the oldest are at the front.
  const keys = new Map<string, number>();
  const fresh = (atMs: number | undefined) => atMs !== undefined && clock.now() - atMs < rememberMs;
  return {
    add(key) {
      keys.delete(key);
      keys.set(key, clock.now());
      for (const [oldest, atMs] of keys) {
        if (keys.size <= most && fresh(atMs)) break;
        keys.delete(oldest);
      }
    },
    has: (key) => fresh(keys.get(key)),
    get size() {
      return keys.size;
    },
    clear: () => keys.clear(),
  };
}
