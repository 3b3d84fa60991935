import { overloaded } from "../answers/overloaded.js";

/** Clients without a request that are kept: a table whose entries come and go with each request is built anew all the time, and ends in the old heap. */
const KEPT_CLIENTS = 1024;

export interface RequestsInFlightOptions {
  /** Requests of all clients together. */
  readonly all: number;
  readonly perClient: number;
}

/** Counts the requests that are being served, in all and per client. A request that is split counts once for each part. */
export class RequestsInFlight {
  readonly #options: RequestsInFlightOptions;
  readonly #byClient = new Map<string, number>();
  #count = 0;

  constructor(options: RequestsInFlightOptions) {
    this.#options = options;
  }

  /** Admits a request. The caller ends the slot. Errors: `KV_PROXY_OVERLOADED`, 429 or 503. */
  admit(client: string): RequestSlot {
    const slot = new RequestSlot((by) => this.#add(client, by));
    slot.grow(1);
    return slot;
  }

  #add(client: string, by: number): void {
    const { all, perClient } = this.#options;
    const own = (this.#byClient.get(client) ?? 0) + by;
    if (by > 0 && own > perClient) throw tooMany("limits.requestsPerClient", perClient, true);
    if (by > 0 && this.#count + by > all) throw tooMany("limits.requestsInFlight", all, false);
    this.#count += by;
    if (own === 0 && this.#byClient.size > KEPT_CLIENTS) this.#byClient.delete(client);
    else this.#byClient.set(client, own);
  }
}

/** The place of one request among those in flight. */
export class RequestSlot {
  readonly #add: (by: number) => void;
  #held = 0;

  constructor(add: (by: number) => void) {
    this.#add = add;
  }

  /** Takes more places, for further parts. Errors: `KV_PROXY_OVERLOADED`; no place is taken then. */
  grow(by: number): void {
    this.#add(by);
    this.#held += by;
  }

  /** Gives all places back. */
  end(): void {
    if (this.#held > 0) this.#add(-this.#held);
    this.#held = 0;
  }
}

function tooMany(limit: string, count: number, byClient: boolean) {
  const whose = byClient ? "of this client are in flight" : "are in flight";
  return overloaded({
    limit,
    message: `${count} requests ${whose}, which is the limit; each prompt and copy of a request counts`,
    byClient,
  });
}
