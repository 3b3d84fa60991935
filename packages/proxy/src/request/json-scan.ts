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
 * byte, spread over the arrival of the body.
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
    let inString = this.#inString;
    let escaped = this.#escaped;
    for (let at = 0; at < bytes.length; at += 1) {
      const byte = bytes[at];
      if (inString) {
        if (escaped) escaped = false;
        else if (byte === BACKSLASH) escaped = true;
        else if (byte === QUOTE) inString = false;
      } else if (byte === QUOTE) inString = true;
      else if (byte === COMMA) this.#values += 1;
      else if (byte === COLON) this.#member();
      // [ and {, ] and }
      else if (byte === 0x5b || byte === 0x7b) this.#open();
      else if (byte === 0x5d || byte === 0x7d) this.#depth -= 1;
    }
    this.#inString = inString;
    this.#escaped = escaped;
    if (this.#values > this.#limits.bodyValues)
      throw above("limits.bodyValues", this.#limits.bodyValues, "values");
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
