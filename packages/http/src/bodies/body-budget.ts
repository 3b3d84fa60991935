import { KvError } from "@kv/interface";
import { overloaded } from "../answers/overloaded.js";

export interface BodyBudgetOptions {
  /** Bytes of all bodies together. */
  readonly allBytes: number;
  readonly perClientBytes: number;
}

/** The first bytes of a body are not counted: short requests are served while long ones wait for memory. */
const UNCOUNTED_BYTES = 16 * 1024;

/**
 * The memory for clients' bodies, from their first byte until the request has its answer. When it is used up, the largest body that is still
 * arriving is refused. So clients that send large bodies slowly are refused before those that send small ones.
 */
export class BodyBudget {
  readonly #options: BodyBudgetOptions;
  readonly #arriving = new Set<BodyShare>();
  readonly #byClient = new Map<string, number>();
  #heldBytes = 0;

  constructor(options: BodyBudgetOptions) {
    this.#options = options;
  }

  /** Opens the share of one body. `refuse` is called when it must make room for others. The caller ends the share. */
  open(client: string, refuse: (error: KvError) => void): BodyShare {
    return new BodyShare(this, client, refuse);
  }

  /** Counts `more` bytes for a share. Errors: `KV_PROXY_OVERLOADED`; with status 413 when no waiting would help. */
  take(share: BodyShare, more: number): void {
    const { allBytes, perClientBytes } = this.#options;
    if (share.heldBytes + more > Math.min(allBytes, perClientBytes))
      throw neverFits(share, more, this.#options);
    const heldByClient = () => this.#byClient.get(share.client) ?? 0;
    while (heldByClient() + more > perClientBytes) this.#makeRoom(share, more, true);
    while (this.#heldBytes + more > allBytes) this.#makeRoom(share, more, false);
    this.#heldBytes += more;
    this.#byClient.set(share.client, heldByClient() + more);
    if (share.arriving) this.#arriving.add(share);
  }

  /** Gives the bytes of a share back. */
  give(share: BodyShare): void {
    this.#arriving.delete(share);
    this.#heldBytes -= share.heldBytes;
    const left = (this.#byClient.get(share.client) ?? 0) - share.heldBytes;
    if (left > 0) this.#byClient.set(share.client, left);
    else this.#byClient.delete(share.client);
  }

  /** The body has arrived, so it is not refused any more. */
  arrived(share: BodyShare): void {
    this.#arriving.delete(share);
  }

  #makeRoom(share: BodyShare, more: number, ofClient: boolean): void {
    let largest = share;
    let largestBytes = share.heldBytes + more;
    for (const other of this.#arriving) {
      if (other === share || (ofClient && other.client !== share.client)) continue;
      if (other.heldBytes <= largestBytes) continue;
      largest = other;
      largestBytes = other.heldBytes;
    }
    const error = full(this.#options, ofClient);
    if (largest === share) throw error;
    largest.end();
    largest.refuse(error);
  }
}

/** What one request holds of the budget. */
export class BodyShare {
  /** The client, as limits per client count it. */
  readonly client: string;
  /** Called when it must make room for others. */
  readonly refuse: (error: KvError) => void;
  readonly #budget: BodyBudget;
  #lengthBytes = 0;
  #heldBytes = 0;
  #arriving = true;
  #ended = false;

  constructor(budget: BodyBudget, client: string, refuse: (error: KvError) => void) {
    this.#budget = budget;
    this.client = client;
    this.refuse = refuse;
  }

  /** Bytes that are counted. */
  get heldBytes(): number {
    return this.#heldBytes;
  }

  /** Whether more of the body may come. */
  get arriving(): boolean {
    return this.#arriving;
  }

  /** Counts bytes that have come, or copies of them. Errors: `KV_PROXY_OVERLOADED`. */
  add(lengthBytes: number): void {
    if (this.#ended) return;
    this.#lengthBytes += lengthBytes;
    const more = Math.max(0, this.#lengthBytes - UNCOUNTED_BYTES) - this.#heldBytes;
    if (more === 0) return;
    this.#budget.take(this, more);
    this.#heldBytes += more;
  }

  /** The whole body has come. */
  arrived(): void {
    this.#arriving = false;
    this.#budget.arrived(this);
  }

  /** Gives the bytes back. */
  end(): void {
    if (this.#ended) return;
    this.#ended = true;
    this.#budget.give(this);
    this.#heldBytes = 0;
  }
}

function full({ allBytes, perClientBytes }: BodyBudgetOptions, byClient: boolean): KvError {
  return overloaded({
    limit: byClient ? "limits.bodiesPerClientLengthBytes" : "limits.bodiesLengthBytes",
    message: byClient
      ? `the bodies of this client are larger than ${perClientBytes} bytes together`
      : `the bodies of all requests are larger than ${allBytes} bytes together`,
    byClient,
  });
}

function neverFits(share: BodyShare, more: number, { allBytes, perClientBytes }: BodyBudgetOptions): KvError {
  const limit = perClientBytes <= allBytes ? "limits.bodiesPerClientLengthBytes" : "limits.bodiesLengthBytes";
  const message =
    `the request needs ${share.heldBytes + more} bytes with all its prompts and copies; ` +
    `the limit is ${Math.min(allBytes, perClientBytes)}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: `send fewer copies in one request, or raise ${limit}`,
    details: { httpStatus: 413, limit },
  });
}
