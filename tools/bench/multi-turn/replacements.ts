import type { Client, EndedTurn, Served } from "./traffic.js";

interface Victim {
  readonly url: string;
  /** Ends it. Resolves when another one is in its place. */
  replace(): Promise<void>;
}

/**
 * Replaces instances, one after another, each time so many requests were sent; the next one is not
 * ended before the last one is back.
 */
export class Replacements {
  readonly #every: number;
  readonly #victims: readonly Victim[];
  readonly #client: Client;
  /** Requests that the client has sent again, as their stream broke. */
  readonly #again = new Set<string>();
  readonly #ends: { readonly url: string; readonly atMs: number }[] = [];
  #sent = 0;
  #back = Promise.resolve();

  constructor(every: number, victims: readonly Victim[], client: Client) {
    this.#every = every;
    this.#victims = victims;
    this.#client = client;
  }

  get count(): number {
    return this.#ends.length;
  }

  /** Streams that had begun, which the client asked for again. */
  get failed(): number {
    return this.#again.size;
  }

  /** The client whose requests are counted. */
  get client(): Client {
    const send: Client["send"] = async (...request) => {
      this.#sent += 1;
      if (this.#sent % this.#every === 0) this.#back = this.#back.then(() => this.#replace());
      try {
        return await this.#client.send(...request);
      } catch {
        const sent = await this.#client.send(...request);
        this.#again.add(sent.requestId);
        return sent;
      }
    };
    return { send, now: () => this.#client.now(), sleep: (ms) => this.#client.sleep(ms) };
  }

  /** Resolves when none is under way. */
  async ended(): Promise<void> {
    await this.#back;
  }

  /** Whether the D of the turn before was there until this one had ended, and this one's too. */
  hadItsDecode(
    { before, requestId, endedAtMs }: EndedTurn,
    records: ReadonlyMap<string, Served>,
  ): boolean {
    if (this.#again.has(requestId) || records.get(requestId)?.restarts !== undefined) return false;
    if (before === undefined) return true;
    const decode = records.get(before.requestId)?.decode;
    const took = ({ url, atMs }: { url: string; atMs: number }) =>
      url === decode && atMs >= before.startedAtMs && atMs <= endedAtMs;
    return !this.#ends.some(took);
  }

  async #replace(): Promise<void> {
    const victim = this.#victims[this.count % this.#victims.length];
    if (victim === undefined) return;
    this.#ends.push({ url: victim.url, atMs: this.#client.now() });
    await victim.replace();
  }
}
