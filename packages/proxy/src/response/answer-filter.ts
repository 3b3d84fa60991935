import type { Endpoint } from "@kv/fleet/front-end";
import { asBuffer, EventFrames, editData, editText, type StreamEvent } from "@kv/http";
import { hidingEdits, LEFT_OUT } from "./answer-members.js";
import { type CachedTokens, cachedTokensEdit } from "./cached-tokens.js";
import { MemberEditor } from "./member-editor.js";
import { StreamRules } from "./stream-rules.js";

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
 * a stream is checked. All other bytes stay as they are. The events of a stream pass whole.
 */
export class AnswerFilter {
  readonly #events: EventFrames | undefined;
  readonly #rules: StreamRules | undefined;
  readonly #editor: MemberEditor;
  /** The end of an unstreamed answer's bytes, in which a member may begin. */
  #held = "";

  constructor(
    endpoint: Endpoint,
    { status, eventStream, onePart, kvFromPrefill, cachedTokens }: AnswerTraits,
  ) {
    this.#events = eventStream ? new EventFrames("latin1") : undefined;
    this.#rules = eventStream && status === 200 ? new StreamRules(endpoint, onePart) : undefined;
    // Events of streams have no member that is left out.
    const hiding = hidingEdits(kvFromPrefill && !eventStream);
    const isCounted = cachedTokens !== undefined && status === 200;
    const edits = isCounted ? { usage: cachedTokensEdit(cachedTokens), ...hiding } : hiding;
    this.#editor = new MemberEditor(edits);
  }

  /** Whether the instance reported a failure in an event of its stream. */
  get failed(): boolean {
    return this.#rules?.failed === true;
  }

  /** What is wrong with the answer; undefined for nothing. */
  get problem(): string | undefined {
    if (this.#editor.heldBytes > MAX_VALUE_BYTES)
      return `sent a usage of more than ${MAX_VALUE_BYTES} bytes`;
    return this.#rules?.problem ?? this.#events?.problem;
  }

  /** Names of the members that the answer should have, and that were hidden so far. */
  get leftOut(): readonly string[] {
    return LEFT_OUT.filter((name) => this.#editor.erased.has(name));
  }

  /** Reads the next bytes, and returns those that leave. */
  async push(chunk: Uint8Array): Promise<Buffer> {
    if (this.#events !== undefined) return this.#passEvents(this.#events.push(chunk));
    const bytes = asBuffer(chunk);
    const text = this.#held + bytes.toString("latin1");
    const edits = await this.#editor.edit(text);
    const length = this.#editor.passingLength(text, edits.at(-1)?.end ?? 0);
    this.#held = text.slice(length);
    if (edits.length === 0 && length === bytes.length) return bytes;
    return toBytes(editText(text.slice(0, length), edits));
  }

  /** The answer has ended: returns the last bytes that leave. */
  async end(): Promise<Buffer> {
    if (this.#events === undefined) return toBytes(this.#held + this.#editor.end());
    const last = await this.#passEvents(this.#events.end());
    this.#rules?.end();
    return this.problem === undefined ? last : NOTHING;
  }

  /** Nothing passes from the first event on that has a problem. */
  async #passEvents(events: readonly StreamEvent[]): Promise<Buffer> {
    const passing: Buffer[] = [];
    for (const event of events) {
      this.#rules?.read(event);
      if (this.#rules?.problem !== undefined) break;
      passing.push(this.#editor.isPlain(event.data) ? event.bytes : await this.#edit(event));
    }
    const [first] = passing;
    return passing.length === 1 && first !== undefined ? first : Buffer.concat(passing);
  }

  async #edit(event: StreamEvent): Promise<Buffer> {
    const edits = await this.#editor.edit(event.data);
    // A value that its event cuts off stays as it came.
    if (this.#editor.end() !== "") edits.pop();
    return editData(event, edits);
  }
}

const NOTHING = Buffer.alloc(0);
/** Each character stands for a byte. */
const toBytes = (text: string) => Buffer.from(text, "latin1");
