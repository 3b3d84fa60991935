import { KvError } from "@kv/interface";
import { COLON, COMMA, JsonReader, OPEN_LIST, OPEN_OBJECT } from "./json-reader.js";

/** Limits of a JSON text, so that its parse takes little time and its values little memory. */
export interface JsonLimits {
  /** Objects and lists inside of one another. */
  readonly bodyDepth: number;
  /** Members of all objects, and all objects and lists. */
  readonly bodyMembers: number;
  /** Elements of all lists and members of all objects. */
  readonly bodyValues: number;
}

/**
 * Members of the outermost object. vLLM's requests have about 80. Each part of a request that is
 * split has all of them.
 */
export const TOP_LEVEL_MEMBERS = 1_000;

/**
 * Counts the values of a JSON text while its bytes come, without parsing them. Whether the text is
 * JSON, the parse decides. Its cost is a step for each byte outside of strings, spread over the
 * arrival of the body.
 */
export class JsonScan {
  readonly #limits: JsonLimits;
  readonly #reader = new JsonReader();
  #members = 0;
  #topLevel = 0;
  #values = 0;

  constructor(limits: JsonLimits) {
    this.#limits = limits;
  }

  /** Reads the next bytes. Errors: `KV_REQUEST_INVALID` above a limit. */
  push(bytes: Uint8Array): void {
    const { bodyDepth, bodyMembers, bodyValues } = this.#limits;
    const reader = this.#reader;
    for (let at = reader.next(bytes, 0); at !== -1; at = reader.next(bytes, at + 1)) {
      switch (reader.token) {
        case COMMA:
          this.#values += 1;
          if (this.#values > bodyValues) throw above("limits.bodyValues", bodyValues, "values");
          break;
        case OPEN_LIST:
        case OPEN_OBJECT:
          if (reader.depth > bodyDepth)
            throw above("limits.bodyDepth", bodyDepth, "levels of objects and lists");
          this.#member(bodyMembers);
          break;
        case COLON:
          this.#member(bodyMembers);
          if (reader.depth === 1) this.#topLevel += 1;
          if (this.#topLevel > TOP_LEVEL_MEMBERS)
            throw above(undefined, TOP_LEVEL_MEMBERS, "top-level members");
          break;
      }
    }
  }

  #member(most: number): void {
    this.#members += 1;
    if (this.#members > most) throw above("limits.bodyMembers", most, "members and lists");
  }
}

function above(limit: string | undefined, count: number, what: string): KvError {
  return new KvError("KV_REQUEST_INVALID", `the body has more than ${count} ${what}`, {
    hint: limit === undefined ? "send fewer" : `send fewer, or raise ${limit}`,
    details: { limit: limit ?? "top-level members" },
  });
}
