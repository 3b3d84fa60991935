import type { Endpoint } from "@kv/fleet/front-end";
import { hidingEdits, LEFT_OUT } from "./answer-members.js";
import { type CachedTokens, cachedTokensEdit } from "./cached-tokens.js";
import { MemberEditor } from "./member-editor.js";
import { StreamWatch } from "./stream-watch.js";

/** What decides how an answer is read. */
export interface AnswerTraits {
  readonly status: number;
  readonly eventStream: boolean;
  /** The leg had one prompt and one copy, so the answer has one choice, with the index 0. */
  readonly onePart: boolean;
  /** P computed the prompt, so the instance does not know all of it. */
  readonly kvFromPrefill: boolean;
  /** Where the instance could not know how many tokens of the prompt P had cached: asks P's leg. */
  readonly cachedTokens?: CachedTokens | undefined;
}

/** Of a value that P's cached tokens are put into. */
const MAX_VALUE_BYTES = 64 * 1024;

/**
 * What of an answer's bytes its client gets: members are hidden, P's cached tokens are put in, and
 * a stream is checked. All other bytes stay as they are.
 */
export class AnswerFilter {
  readonly #watch: StreamWatch | undefined;
  readonly #editor: MemberEditor;

  constructor(
    endpoint: Endpoint,
    { status, eventStream, onePart, kvFromPrefill, cachedTokens }: AnswerTraits,
  ) {
    this.#watch = eventStream && status === 200 ? new StreamWatch(endpoint, onePart) : undefined;
    // Events of streams have no member that is left out.
    const hiding = hidingEdits(kvFromPrefill && !eventStream);
    const isCounted = cachedTokens !== undefined && status === 200;
    const edits = isCounted ? { usage: cachedTokensEdit(cachedTokens), ...hiding } : hiding;
    this.#editor = new MemberEditor(edits, { isStream: eventStream });
  }

  /** Whether the instance reported a failure in an event of its stream. */
  get failed(): boolean {
    return this.#watch?.failed === true;
  }

  /** What is wrong with the answer; undefined for nothing. */
  get problem(): string | undefined {
    if (this.#editor.heldBytes > MAX_VALUE_BYTES)
      return `sent a usage of more than ${MAX_VALUE_BYTES} bytes`;
    return this.#watch?.problem;
  }

  /** Names of the members that the answer should have, and that were hidden so far. */
  get leftOut(): readonly string[] {
    return LEFT_OUT.filter((name) => this.#editor.erased.has(name));
  }

  /** Reads the next bytes, and returns those that leave. */
  push(chunk: Uint8Array): Buffer | Promise<Buffer> {
    return this.#editor.push(this.#watch?.push(chunk) ?? chunk);
  }

  /** The answer has ended: returns the last bytes that leave. */
  async end(): Promise<Buffer> {
    const last = await this.#editor.push(this.#watch?.end() ?? NOTHING);
    return Buffer.concat([last, this.#editor.end()]);
  }
}

const NOTHING = Buffer.alloc(0);
