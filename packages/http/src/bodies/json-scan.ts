import { KvError } from "@kv/interface";

/** Limits of a JSON text, so that its parse takes little time and its values little memory. */
export interface JsonLimits {
  /** Objects and lists inside of one another. */
  readonly bodyDepth: number;
  /** Members of all objects, and all objects and lists. */
  readonly bodyMembers: number;
  /** Elements of all lists and members of all objects. */
  readonly bodyValues: number;
}

/** Members of the outermost object. vLLM's requests have about 80. Each part of a request that is split has all of them. */
export const TOP_LEVEL_MEMBERS = 1_000;

const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const COMMA = 0x2c;
const COLON = 0x3a;

/**
 * Counts the values of a JSON text while its bytes come, without parsing them. Whether the text is JSON, the parse decides. Its cost is a step for each
 * byte outside of strings, spread over the arrival of the body.
 */
export class JsonScan {
  readonly #limits: JsonLimits;
  #inString = false;
  #escaped = false;
  #depth = 0;
  #members = 0;
  #topLevel = 0;
  #values = 0;

  constructor(limits: JsonLimits) {
    this.#limits = limits;
  }

  /** Reads the next bytes. Errors: `KV_REQUEST_INVALID` above a limit. */
  push(bytes: Uint8Array): void {
    let at = this.#inString ? this.#endOfString(bytes, 0) : 0;
    while (at < bytes.length) {
      const byte = bytes[at];
      at += 1;
      if (byte === QUOTE) at = this.#endOfString(bytes, at);
      else if (byte === COMMA) this.#value();
      else if (byte === COLON) this.#member();
      // [ and {, ] and }
      else if (byte === 0x5b || byte === 0x7b) this.#open();
      else if (byte === 0x5d || byte === 0x7d) this.#depth -= 1;
    }
  }

  /** The position after the closing quote of the string that goes on at `from`; the length where it has not come. */
  #endOfString(bytes: Uint8Array, from: number): number {
    let at = from;
    for (;;) {
      const quote = bytes.indexOf(QUOTE, at);
      const end = quote === -1 ? bytes.length : quote;
      let slashes = 0;
      while (end - 1 - slashes >= at && bytes[end - 1 - slashes] === BACKSLASH) slashes += 1;
      // A backslash at the end of the bytes before escapes the first one of these.
      if (this.#escaped && end - slashes === at) slashes += 1;
      const escaped = slashes % 2 === 1;
      this.#escaped = quote === -1 && escaped;
      this.#inString = quote === -1 || escaped;
      if (quote === -1) return bytes.length;
      at = quote + 1;
      if (!escaped) return at;
    }
  }

  #value(): void {
    this.#values += 1;
    const { bodyValues } = this.#limits;
    if (this.#values > bodyValues) throw above("limits.bodyValues", bodyValues, "values");
  }

  #open(): void {
    this.#depth += 1;
    this.#members += 1;
    const { bodyDepth, bodyMembers } = this.#limits;
    if (this.#depth > bodyDepth) throw above("limits.bodyDepth", bodyDepth, "levels of objects and lists");
    if (this.#members > bodyMembers) throw above("limits.bodyMembers", bodyMembers, "members and lists");
  }

  #member(): void {
    this.#members += 1;
    const { bodyMembers } = this.#limits;
    if (this.#members > bodyMembers) throw above("limits.bodyMembers", bodyMembers, "members and lists");
    if (this.#depth !== 1) return;
    this.#topLevel += 1;
    if (this.#topLevel > TOP_LEVEL_MEMBERS) throw above(undefined, TOP_LEVEL_MEMBERS, "top-level members");
  }
}

function above(limit: string | undefined, count: number, what: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body has more than ${count} ${what}`, {
    hint: limit === undefined ? "send fewer" : `send fewer, or raise ${limit}`,
    details: { limit: limit ?? "top-level members" },
  });
}
