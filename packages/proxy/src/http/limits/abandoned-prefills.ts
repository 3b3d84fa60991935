import { overloaded } from "@kv/http";
import type { Clock } from "@kv/interface";

export interface AbandonedPrefillsOptions {
  readonly clock: Clock;
  /** How many a client may abandon in `windowMs`; infinite: nothing is counted. */
  readonly limit: number;
  readonly windowMs: number;
}

/** Clients that are remembered. Where there are more, the one that was quiet for longest is forgotten. */
const MAX_CLIENTS = 10_000;

/**
 * Bounds how often a client disconnects before its answer begins. Each time, a prefill instance may hold blocks until their lease ends, and a few such
 * clients would fill it.
 */
export class AbandonedPrefills {
  readonly #options: AbandonedPrefillsOptions;
  /** The times of each client's last ones, oldest first. The client with the oldest entry is first. */
  readonly #timesByClient = new Map<string, number[]>();

  constructor(options: AbandonedPrefillsOptions) {
    this.#options = options;
  }

  /** Errors: `KV_PROXY_OVERLOADED` (429) for a client that has abandoned too many. */
  check(client: string): void {
    if (this.#timesByClient.size === 0) return;
    const times = this.#timesByClient.get(client);
    const { clock, limit, windowMs } = this.#options;
    const first = times?.[0];
    if (times === undefined || first === undefined || times.length < limit) return;
    const leftMs = first + windowMs - clock.now();
    if (leftMs <= 0) return;
    throw overloaded({
      limit: "limits.abandonedPrefills",
      message: `this client has disconnected from ${limit} requests within ${windowMs / 1000} s before their answers began`,
      byClient: true,
      retryAfterSeconds: Math.ceil(leftMs / 1000),
      hint: "wait for answers; limits.abandonedPrefills sets the limit",
    });
  }

  /** Records that a client has disconnected before its answer began. */
  add(client: string): void {
    const { clock, limit } = this.#options;
    if (limit === Number.POSITIVE_INFINITY) return;
    const times = this.#timesByClient.get(client) ?? [];
    times.push(clock.now());
    if (times.length > limit) times.shift();
    this.#timesByClient.delete(client);
    this.#timesByClient.set(client, times);
    if (this.#timesByClient.size <= MAX_CLIENTS) return;
    const [quietest] = this.#timesByClient.keys();
    if (quietest !== undefined) this.#timesByClient.delete(quietest);
  }
}
