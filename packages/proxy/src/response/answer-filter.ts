import type { Endpoint } from "@kv/fleet/front-end";
import {
  asBuffer,
  EventFrames,
  editData,
  editText,
  isDone,
  isObject,
  JsonValueEnd,
  type StreamEvent,
  type TextEdit,
} from "@kv/http";
import {
  EDITED_MEMBERS,
  type Fields,
  HIDDEN,
  HIDDEN_OR_LEFT_OUT,
  LEFT_OUT,
  type MemberEdits,
  type ValueEdit,
} from "./answer-members.js";

export interface AnswerTraits {
  readonly status: number;
  readonly eventStream: boolean;
  /** One prompt and one copy, so one choice with index 0. */
  readonly onePart: boolean;
  /** P computed the prompt, so this instance does not know all of it. */
  readonly kvFromPrefill: boolean;
  /** Asks P's leg for cached tokens that the instance could not know. */
  readonly cachedTokens?: CachedTokens | undefined;
}

const MAX_VALUE_BYTES = 64 * 1024;

/**
 * Hides members, puts P's cached tokens in, and checks a stream. Other bytes stay unchanged, and
 * events pass whole.
 */
export class AnswerFilter {
  readonly #events: EventFrames | undefined;
  readonly #rules: StreamRules | undefined;
  readonly #editor: MemberEditor;
  /** Not sent yet, because a member may begin here. */
  #held = "";

  constructor(
    endpoint: Endpoint,
    { status, eventStream, onePart, kvFromPrefill, cachedTokens }: AnswerTraits,
  ) {
    this.#events = eventStream ? new EventFrames("latin1") : undefined;
    this.#rules = eventStream && status === 200 ? new StreamRules(endpoint, onePart) : undefined;
    // Stream events have no member that is left out.
    const hiding = kvFromPrefill && !eventStream ? HIDDEN_OR_LEFT_OUT : HIDDEN;
    const isCounted = cachedTokens !== undefined && status === 200;
    const edits = isCounted ? { usage: cachedTokensEdit(cachedTokens), ...hiding } : hiding;
    this.#editor = new MemberEditor(edits);
  }

  get failed(): boolean {
    return this.#rules?.failed === true;
  }

  get problem(): string | undefined {
    if (this.#editor.heldBytes > MAX_VALUE_BYTES)
      return `sent a usage of more than ${MAX_VALUE_BYTES} bytes`;
    return this.#rules?.problem ?? this.#events?.problem;
  }

  /** Names of hidden members that the answer should have. */
  get leftOut(): readonly string[] {
    return LEFT_OUT.filter((name) => this.#editor.erased.has(name));
  }

  /** At once, unless a value waits for its edit. */
  push(chunk: Uint8Array): Buffer | Promise<Buffer> {
    if (this.#events === undefined) return this.#passText(asBuffer(chunk));
    return this.#passEvents(this.#events.push(chunk));
  }

  async #passText(bytes: Buffer): Promise<Buffer> {
    const text = this.#held + bytes.toString("latin1");
    const edits = await this.#editor.edit(text);
    const length = this.#editor.passingLength(text, edits.at(-1)?.end ?? 0);
    this.#held = text.slice(length);
    const isUnchanged = edits.length === 0 && length === text.length;
    if (isUnchanged && text.length === bytes.length) return bytes;
    return toBytes(editText(text.slice(0, length), edits));
  }

  async end(): Promise<Buffer> {
    if (this.#events === undefined) return toBytes(this.#held + this.#editor.end());
    const last = await this.#passEvents(this.#events.end());
    this.#rules?.end();
    return this.problem === undefined ? last : NOTHING;
  }

  /** From the first event with a problem on, nothing passes. */
  #passEvents(events: readonly StreamEvent[]): Buffer | Promise<Buffer> {
    const passing: StreamEvent[] = [];
    for (const event of events) {
      this.#rules?.read(event);
      if (this.#rules?.problem !== undefined) break;
      passing.push(event);
    }
    if (!passing.every(({ data }) => this.#editor.isPlain(data))) return this.#editAll(passing);
    const [first] = passing;
    return passing.length === 1 && first !== undefined
      ? first.bytes
      : Buffer.concat(passing.map(({ bytes }) => bytes));
  }

  async #editAll(events: readonly StreamEvent[]): Promise<Buffer> {
    const edited: Buffer[] = [];
    for (const event of events) edited.push(await this.#edit(event));
    return Buffer.concat(edited);
  }

  async #edit(event: StreamEvent): Promise<Buffer> {
    const edits = await this.#editor.edit(event.data);
    // A value cut off by its event stays unchanged.
    if (this.#editor.end() !== "") edits.pop();
    return editData(event, edits);
  }
}

const NOTHING = Buffer.alloc(0);
/** Latin-1 maps each character to one byte. */
const toBytes = (text: string) => Buffer.from(text, "latin1");

interface OpenMember {
  readonly name: string;
  readonly end: JsonValueEnd;
  /** As much of the value as an edit must read. */
  value: string;
}

const BEGIN_OF_MEMBER = /"\w{0,32}(?:"\s*:?\s*)?$/;

/**
 * Edits values in a JSON text that comes in pieces, at any depth. Quotes in strings are escaped, so
 * no string looks like a name.
 */
export class MemberEditor {
  readonly #names: readonly string[];
  readonly erased = new Set<string>();
  #open: OpenMember | undefined;

  constructor(private readonly edits: MemberEdits) {
    this.#names = Object.keys(edits);
  }

  get heldBytes(): number {
    return this.#open?.value.length ?? 0;
  }

  /** Whether text outside a member's value has no member to edit. */
  isPlain(text: string): boolean {
    return this.#open === undefined && !this.#names.some((name) => text.includes(name));
  }

  /** `text` has one character per byte. */
  async edit(text: string): Promise<TextEdit[]> {
    const edits: TextEdit[] = [];
    let start = 0;
    for (;;) {
      if (this.#open === undefined) {
        EDITED_MEMBERS.lastIndex = start;
        const name = EDITED_MEMBERS.exec(text)?.[1];
        if (name === undefined) return edits;
        start = EDITED_MEMBERS.lastIndex;
        if (!Object.hasOwn(this.edits, name)) continue;
        this.#open = { name, end: new JsonValueEnd(), value: "" };
        if (this.edits[name] === null && text[start] !== "n") this.erased.add(name);
      }
      const { name, end } = this.#open;
      const edit = this.edits[name];
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

  /** Length that may leave: a member may begin in the rest. `from`: the end of the last edit. */
  passingLength(text: string, from: number): number {
    // The start of a member has one quote or two.
    const quote = text.lastIndexOf('"', text.lastIndexOf('"') - 1);
    const searched = Math.max(from, quote);
    const begin = this.#open === undefined ? text.slice(searched).search(BEGIN_OF_MEMBER) : -1;
    return begin === -1 ? text.length : searched + begin;
  }

  /** Returns an unfinished value that waits for its edit. */
  end(): string {
    const value = this.#open?.value ?? "";
    this.#open = undefined;
    return value;
  }
}

/** The events that end a stream. Elsewhere `[DONE]` does, and events have choices. */
const LAST_EVENTS: Readonly<Partial<Record<Endpoint, readonly string[]>>> = {
  "/v1/responses": ["response.completed", "response.incomplete", "response.failed"],
  "/v1/messages": ["message_stop", "error"],
};

const OTHER_INDEX = /"index"\s*:\s*[^0\s]/;

/** After the first choice, only such events matter. */
const isDecisive = (data: string) => data.includes('"error"') || OTHER_INDEX.test(data);

export class StreamRules {
  readonly #lastEvents: readonly string[] | undefined;
  #answered: boolean;
  #ended = false;
  failed = false;
  problem: string | undefined;

  /** `onePart`: one prompt and one copy, so every choice has index 0. */
  constructor(
    endpoint: Endpoint,
    private readonly onePart: boolean,
  ) {
    this.#lastEvents = LAST_EVENTS[endpoint];
    this.#answered = this.#lastEvents !== undefined;
  }

  read(event: StreamEvent): void {
    const { name, data, isCut } = event;
    const isLastOfOthers = this.#lastEvents !== undefined && isDone(event);
    if (data === "" || isLastOfOthers) return;
    if (this.#ended) this.problem = "sent more after the last event of its stream";
    else if (isDone(event)) {
      this.#ended = this.#answered || this.failed;
      if (!this.#ended) this.problem = "ended its stream without a choice";
    } else {
      this.#readData(event);
      this.#ended = !isCut && this.#lastEvents?.includes(name) === true;
    }
  }

  end(): void {
    if (!this.#ended) this.problem ??= "ended its stream without its last event";
  }

  #readData({ name, data }: StreamEvent): void {
    if (name === "error") this.failed = true;
    if (this.#answered && !isDecisive(data)) return;
    const { error, choices } = fieldsOf(data);
    if (error != null) this.failed = true;
    if (this.#lastEvents !== undefined || !Array.isArray(choices)) return;
    this.#answered ||= isObject(choices[0]);
    if (this.onePart && choices.some((choice) => isObject(choice) && (choice.index ?? 0) !== 0))
      this.problem = "streamed a choice with another index than 0";
  }
}

/** Returns no members where the data is no object. */
function fieldsOf(data: string): Fields {
  try {
    const fields: unknown = JSON.parse(data);
    return isObject(fields) ? fields : {};
  } catch {
    // The client's parser refuses such data.
    return {};
  }
}

/** Finds a stream's first event that has data. */
export class FirstEvent {
  readonly #events = new EventFrames("utf8");
  #leftBytes: number;
  event: StreamEvent | undefined;

  /** If `limitBytes` do not show the event, it stays unknown. */
  constructor(limitBytes: number) {
    this.#leftBytes = limitBytes;
  }

  /** Returns true when further bytes would tell nothing. */
  push(chunk: Uint8Array): boolean {
    const bytes = chunk.subarray(0, this.#leftBytes);
    this.#leftBytes -= bytes.length;
    this.#take(this.#events.push(bytes));
    return this.event !== undefined || this.#leftBytes === 0;
  }

  end(): void {
    if (this.#leftBytes > 0) this.#take(this.#events.end());
  }

  #take(events: readonly StreamEvent[]): void {
    this.event ??= events.find(({ data }) => data !== "");
  }
}

/** An error in a stream's first event, early enough for an HTTP status. */
export interface StreamedError {
  /** The error's `code` if it is an HTTP status, else its type's status, else 502. */
  readonly status: number;
  readonly body: string;
}

/**
 * vLLM streams such an error under status 200 for a failure before the first token. Undefined for
 * another event.
 */
export function streamedError({ name, data }: StreamEvent): StreamedError | undefined {
  const { error } = fieldsOf(data);
  if (name !== "error" && error == null) return undefined;
  const { code, type } = isObject(error) ? error : ({} as Fields);
  const isStatus = typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
  return { status: isStatus ? code : (STATUS_OF_TYPE[String(type)] ?? 502), body: data.trim() };
}

/** HTTP statuses of the Messages API's error types (vLLM 0.33, `translate_error_type`). */
const STATUS_OF_TYPE: Readonly<Record<string, number>> = {
  invalid_request_error: 400,
  authentication_error: 401,
  permission_error: 403,
  not_found_error: 404,
  request_too_large: 413,
  rate_limit_error: 429,
  api_error: 500,
  overloaded_error: 503,
};

/** Prompt tokens that P had cached; undefined where P did not say. */
export type CachedTokens = () => Promise<number | undefined>;

/**
 * Leaves cached tokens out where P's number is unknown. In push, D counts everything from P as
 * cached: vLLM passes P's number only with pull's KV parameters.
 */
export function withCachedTokens(usage: Fields, cached: number | undefined): Fields {
  const changed: Record<string, unknown> = { ...usage };
  if (isObject(usage.prompt_tokens_details))
    changed.prompt_tokens_details = {
      ...usage.prompt_tokens_details,
      cached_tokens: cached ?? null,
    };
  // The Responses API's clients want a number.
  if (isObject(usage.input_tokens_details))
    changed.input_tokens_details = { ...usage.input_tokens_details, cached_tokens: cached ?? 0 };
  const { cache_read_input_tokens: read, input_tokens: input } = usage;
  if (typeof read === "number" && typeof input === "number") {
    // The Messages API's input tokens exclude cached ones.
    changed.cache_read_input_tokens = cached ?? 0;
    changed.input_tokens = Math.max(0, input + read - (cached ?? 0));
  }
  return changed;
}

/** Asks for P's cached tokens only where the usage has some. */
function cachedTokensEdit(cachedTokens: CachedTokens): ValueEdit {
  return (text) => {
    if (!MARKS.some((mark) => text.includes(mark))) return text;
    let usage: unknown;
    try {
      usage = JSON.parse(text);
    } catch {
      // The client's parser refuses such a usage.
      return text;
    }
    if (!isObject(usage)) return text;
    return cachedTokens().then((cached) => JSON.stringify(withCachedTokens(usage, cached)));
  };
}

const MARKS = ["_tokens_details", "cache_read_input_tokens"];
