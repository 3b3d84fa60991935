import type { Endpoint } from "@kv/fleet/front-end";
import {
  asBuffer,
  EventFrames,
  editData,
  editText,
  JsonValueEnd,
  type StreamEvent,
  type TextEdit,
} from "@kv/http";
import {
  EDITED_MEMBERS,
  HIDDEN,
  HIDDEN_OR_LEFT_OUT,
  LEFT_OUT,
  type MemberEdits,
} from "./answer-members.js";
import { type CachedTokens, cachedTokensEdit } from "./cached-tokens.js";
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
    const hiding = kvFromPrefill && !eventStream ? HIDDEN_OR_LEFT_OUT : HIDDEN;
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
    const isUnchanged = edits.length === 0 && length === text.length;
    if (isUnchanged && text.length === bytes.length) return bytes;
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

/** A member whose value is being read. */
interface OpenMember {
  readonly name: string;
  readonly end: JsonValueEnd;
  /** As much of the value as an edit has to read. */
  value: string;
}

/** The end of a text in which a member may begin. */
const BEGIN_OF_MEMBER = /"\w{0,32}(?:"\s*:?\s*)?$/;

/**
 * Changes the values of members in a JSON text that comes in pieces. The members may be at any
 * depth. Quotes inside of strings are escaped, so no string is taken for a name.
 */
export class MemberEditor {
  readonly #edits: MemberEdits;
  readonly #names: readonly string[];
  readonly #erased = new Set<string>();
  #open: OpenMember | undefined = undefined;

  constructor(edits: MemberEdits) {
    this.#edits = edits;
    this.#names = Object.keys(edits);
  }

  /** Names of the members whose values, other than `null`, became `null`. */
  get erased(): ReadonlySet<string> {
    return this.#erased;
  }

  /** Bytes of a value that has not ended, which an edit waits for. */
  get heldBytes(): number {
    return this.#open?.value.length ?? 0;
  }

  /** Whether a text that begins outside of a member's value has none of them. */
  isPlain(text: string): boolean {
    return this.#open === undefined && !this.#names.some((name) => text.includes(name));
  }

  /** The changes of the next piece, in which each character stands for a byte. */
  async edit(text: string): Promise<TextEdit[]> {
    const edits: TextEdit[] = [];
    let start = 0;
    for (;;) {
      if (this.#open === undefined) {
        EDITED_MEMBERS.lastIndex = start;
        const name = EDITED_MEMBERS.exec(text)?.[1];
        if (name === undefined) return edits;
        start = EDITED_MEMBERS.lastIndex;
        if (!Object.hasOwn(this.#edits, name)) continue;
        this.#open = { name, end: new JsonValueEnd(), value: "" };
        if (this.#edits[name] === null && text[start] !== "n") this.#erased.add(name);
      }
      const { name, end } = this.#open;
      const edit = this.#edits[name];
      const found = end.find(text, start);
      const to = found === -1 ? text.length : found;
      const value = edit == null ? "" : this.#open.value + text.slice(start, to);
      let edited = "";
      if (found === -1) this.#open.value = value;
      else {
        this.#open = undefined;
        edited = edit == null ? "null" : await edit(Buffer.from(value, "latin1").toString());
      }
      edits.push({ start, end: to, text: Buffer.from(edited).toString("latin1") });
      if (found === -1) return edits;
      start = to;
    }
  }

  /**
   * How much of a text can leave before more of it has come: no member begins in its end. `from`:
   * behind its last edit.
   */
  passingLength(text: string, from: number): number {
    // It has one quote or two.
    const quote = text.lastIndexOf('"', text.lastIndexOf('"') - 1);
    const searched = Math.max(from, quote);
    const begin = this.#open === undefined ? text.slice(searched).search(BEGIN_OF_MEMBER) : -1;
    return begin === -1 ? text.length : searched + begin;
  }

  /** The text has ended. Returns the value of a member that never ended, which an edit waits for. */
  end(): string {
    const value = this.#open?.value ?? "";
    this.#open = undefined;
    return value;
  }
}
