import type { IncomingMessage } from "node:http";
import type { YieldingQueue } from "@kv/interface";
import { KvError } from "@kv/interface";
import { overloaded } from "../answers/overloaded.js";
import { shortened } from "../answers/shown-value.js";
import { AT_ONCE_BYTES } from "../json/json-pieces.js";
import { type JsonLimits, JsonScan } from "../json/json-reader.js";
import { ByteCollector } from "./byte-collector.js";

/** Limits of one body. */
export interface BodyLimits extends JsonLimits {
  readonly bodyLengthBytes: number;
}

/** Where long bodies wait. */
export interface BodyQueues {
  /** For their next bytes: Node reads at most 64 KiB at once. */
  readonly reads: YieldingQueue;
  /** To be parsed. */
  readonly parses: YieldingQueue;
}

export interface ReadBodyOptions {
  readonly limits: BodyLimits;
  readonly anyContentType?: true | undefined;
  readonly budget: BodyBudget;
  readonly queues: BodyQueues;
  /** The client, as limits per client count it. */
  readonly client: string;
  /** Called when the head is accepted, before the body is read. */
  readonly onAccepted?: (() => void) | undefined;
}

/** The body of a request that has come whole: its bytes, and its share of the memory for bodies. */
export type ReceivedBody = Pick<IncomingBody, "take" | "share">;

/** The bytes of one body while they come, within its limits and the memory for all bodies. */
export class IncomingBody {
  /** Its memory in the budget. Whoever reads it ends the share, with the request. */
  readonly share: BodyShare;
  readonly #limits: BodyLimits;
  readonly #scan: JsonScan;
  readonly #bytes: ByteCollector;
  #lengthBytes = 0;

  /**
   * `refuse`: called when it must make room for other bodies.
   * @throws `KV_REQUEST_INVALID` (413) for a body whose `content-length` says that it is too long.
   */
  constructor(
    { limits, budget, client }: Pick<ReadBodyOptions, "limits" | "budget" | "client">,
    contentLength: string | undefined,
    refuse: (error: KvError) => void,
  ) {
    const expectedBytes = Number(contentLength ?? 0);
    if (expectedBytes > limits.bodyLengthBytes) throw tooLarge(limits.bodyLengthBytes);
    this.#bytes = new ByteCollector(expectedBytes);
    this.#limits = limits;
    this.#scan = new JsonScan(limits);
    this.share = budget.open(client, refuse);
  }

  get lengthBytes(): number {
    return this.#lengthBytes;
  }

  /**
   * Takes the next bytes.
   * @throws `KV_REQUEST_INVALID` above a limit, with the status 413 for too many bytes;
   * `KV_PROXY_OVERLOADED` without memory.
   */
  push(chunk: Buffer): void {
    const { bodyLengthBytes: limitBytes } = this.#limits;
    const leftBytes = limitBytes - this.#lengthBytes;
    this.#lengthBytes += chunk.length;
    // The first byte above a limit decides, wherever the chunks end.
    this.#scan.push(chunk.length > leftBytes ? chunk.subarray(0, leftBytes) : chunk);
    if (chunk.length > leftBytes) throw tooLarge(limitBytes);
    this.share.add(chunk.length);
    this.#bytes.push(chunk);
  }

  /**
   * Returns the bytes once and forgets them, so that they do not stay in memory beside what is
   * parsed from them.
   */
  take(): Buffer {
    return this.#bytes.take();
  }
}

/**
 * Reads a JSON body. The rest of the body is then unread, so the connection cannot be used again.
 * `KV_REQUEST_ABORTED` when the client disconnects.
 * @throws `KV_REQUEST_INVALID` with the HTTP status 413 or 415, or for JSON above the limits;
 * `KV_PROXY_OVERLOADED` without memory for it.
 */
export function readJsonBody(
  request: IncomingMessage,
  options: ReadBodyOptions,
): Promise<ReceivedBody> {
  const { anyContentType, queues, onAccepted } = options;
  const type = request.headers["content-type"];
  return new Promise((resolve, reject) => {
    if (anyContentType !== true && !/^application\/json\s*(;|$)/i.test(type ?? ""))
      throw wrongType(
        type === undefined ? "of no content type" : `of the content type ${shortened(type)}`,
        "send content-type: application/json",
      );
    const coding = request.headers["content-encoding"];
    if (coding !== undefined && coding.toLowerCase() !== "identity")
      throw wrongType(`in the content-encoding ${shortened(coding)}`, "send the body as it is");
    let complete = false;
    let refused = false;
    const refuse = (error: unknown) => {
      if (complete) return;
      refused = true;
      request.removeAllListeners("data");
      body.take();
      body.share.end();
      reject(error);
    };
    const body = new IncomingBody(options, request.headers["content-length"], refuse);
    onAccepted?.();
    request.on("data", (chunk: Buffer) => {
      try {
        body.push(chunk);
        if (body.lengthBytes > AT_ONCE_BYTES) {
          request.pause();
          // The rest of a refused body stays unread.
          queues.reads.push(() => {
            if (!refused) request.resume();
          });
        }
      } catch (error) {
        refuse(error);
      }
    });
    request.once("end", () => {
      complete = true;
      body.share.arrived();
      if (body.lengthBytes > AT_ONCE_BYTES) queues.parses.push(() => resolve(body));
      else resolve(body);
    });
    request.once("error", (cause) => {
      refuse(
        new KvError("KV_REQUEST_ABORTED", "the client disconnected while it sent its request", {
          cause,
        }),
      );
    });
  });
}

function wrongType(what: string, hint: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is ${what}, not JSON`, {
    hint,
    details: { httpStatus: 415 },
  });
}

function tooLarge(limitBytes: number): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body is larger than ${limitBytes} bytes`, {
    hint: "send less at once",
    details: { httpStatus: 413, limit: "limits.bodyLengthBytes" },
  });
}

export interface BodyBudgetOptions {
  /** Bytes of all bodies together. */
  readonly allBytes: number;
  readonly perClientBytes: number;
}

/**
 * The first bytes of a body are not counted: short requests are served while long ones wait for
 * memory.
 */
const UNCOUNTED_BYTES = 16 * 1024;

/**
 * The memory for clients' bodies, from their first byte until the request has its answer. When it
 * is used up, the largest body that is still arriving is refused. So clients that send large bodies
 * slowly are refused before those that send small ones.
 */
export class BodyBudget {
  readonly #options: BodyBudgetOptions;
  readonly #arriving = new Set<BodyShare>();
  readonly #byClient = new Map<string, number>();
  #heldBytes = 0;

  constructor(options: BodyBudgetOptions) {
    this.#options = options;
  }

  /**
   * Opens the share of one body. `refuse` is called when it must make room for others. The caller
   * ends the share.
   */
  open(client: string, refuse: (error: KvError) => void): BodyShare {
    return new BodyShare(this, client, refuse);
  }

  /**
   * Counts `more` bytes for a share.
   * @throws `KV_PROXY_OVERLOADED`; with status 413 when no waiting would help.
   */
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

  get heldBytes(): number {
    return this.#heldBytes;
  }

  get arriving(): boolean {
    return this.#arriving;
  }

  /**
   * Counts bytes that have come, or copies of them.
   * @throws `KV_PROXY_OVERLOADED`.
   */
  add(lengthBytes: number): void {
    if (this.#ended) return;
    this.#lengthBytes += lengthBytes;
    const more = Math.max(0, this.#lengthBytes - UNCOUNTED_BYTES) - this.#heldBytes;
    if (more === 0) return;
    this.#budget.take(this, more);
    this.#heldBytes += more;
  }

  arrived(): void {
    this.#arriving = false;
    this.#budget.arrived(this);
  }

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

function neverFits(
  share: BodyShare,
  more: number,
  { allBytes, perClientBytes }: BodyBudgetOptions,
): KvError {
  const limit =
    perClientBytes <= allBytes ? "limits.bodiesPerClientLengthBytes" : "limits.bodiesLengthBytes";
  const message =
    `the request needs ${share.heldBytes + more} bytes with all its prompts and copies; ` +
    `the limit is ${Math.min(allBytes, perClientBytes)}`;
  return new KvError("KV_REQUEST_INVALID", message, {
    hint: `send fewer copies in one request, or raise ${limit}`,
    details: { httpStatus: 413, limit },
  });
}
