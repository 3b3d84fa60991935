import type { Endpoint } from "@kv/fleet/front-end";
import { EventFrames, isDone, type StreamEvent } from "@kv/http";

type Fields = Readonly<Record<string, unknown>>;

export function isObject(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * Names of the events that end a stream. Where there is none, `[DONE]` ends it, and its events have
 * choices.
 */
const LAST_EVENTS: Readonly<Partial<Record<Endpoint, readonly string[]>>> = {
  "/v1/responses": ["response.completed", "response.incomplete", "response.failed"],
  "/v1/messages": ["message_stop", "error"],
};

const OTHER_INDEX = /"index"\s*:\s*[^0\s]/;

/** Whether the data of an event may decide something, once there was a choice. */
const isDecisive = (data: string) => data.includes('"error"') || OTHER_INDEX.test(data);

/** Checks the events of an instance's stream, one after another. */
export class StreamRules {
  readonly #lastEvents: readonly string[] | undefined;
  readonly #onePart: boolean;
  #answered: boolean;
  #failed = false;
  #ended = false;
  #problem: string | undefined = undefined;

  /** `onePart`: the request had one prompt and one copy, so all choices have the index 0. */
  constructor(endpoint: Endpoint, onePart: boolean) {
    this.#lastEvents = LAST_EVENTS[endpoint];
    this.#onePart = onePart;
    this.#answered = this.#lastEvents !== undefined;
  }

  get failed(): boolean {
    return this.#failed;
  }

  get problem(): string | undefined {
    return this.#problem;
  }

  /** Reads the next event. It passes where there is no problem. */
  read(event: StreamEvent): void {
    const { name, data, isCut } = event;
    const isLastOfOthers = this.#lastEvents !== undefined && isDone(event);
    if (data === "" || isLastOfOthers) return;
    if (this.#ended) this.#problem = "sent more after the last event of its stream";
    else if (isDone(event)) {
      this.#ended = this.#answered || this.#failed;
      if (!this.#ended) this.#problem = "ended its stream without a choice";
    } else {
      this.#readData(event);
      this.#ended = !isCut && this.#lastEvents?.includes(name) === true;
    }
  }

  end(): void {
    if (!this.#ended) this.#problem ??= "ended its stream without its last event";
  }

  #readData({ name, data }: StreamEvent): void {
    if (name === "error") this.#failed = true;
    if (this.#answered && !isDecisive(data)) return;
    const { error, choices } = fieldsOf(data);
    if (error != null) this.#failed = true;
    if (this.#lastEvents !== undefined || !Array.isArray(choices)) return;
    this.#answered ||= isObject(choices[0]);
    if (this.#onePart && choices.some((choice) => isObject(choice) && (choice.index ?? 0) !== 0))
      this.#problem = "streamed a choice with another index than 0";
  }
}

/** The members of an event's data; none where it is no object. */
function fieldsOf(data: string): Fields {
  try {
    const fields: unknown = JSON.parse(data);
    return isObject(fields) ? fields : {};
  } catch {
    // The client's parser refuses it.
    return {};
  }
}

/** Finds the first event of a stream, comments and events without data before it skipped. */
export class FirstEvent {
  readonly #events = new EventFrames("utf8");
  #leftBytes: number;
  #event: StreamEvent | undefined = undefined;

  /** What `limitBytes` do not tell stays unknown. */
  constructor(limitBytes: number) {
    this.#leftBytes = limitBytes;
  }

  /** Undefined while it is unknown. */
  get event(): StreamEvent | undefined {
    return this.#event;
  }

  /** Reads the next bytes. Returns whether more would tell nothing. */
  push(chunk: Uint8Array): boolean {
    const bytes = chunk.subarray(0, this.#leftBytes);
    this.#leftBytes -= bytes.length;
    this.#take(this.#events.push(bytes));
    return this.#event !== undefined || this.#leftBytes === 0;
  }

  end(): void {
    if (this.#leftBytes > 0) this.#take(this.#events.end());
  }

  #take(events: readonly StreamEvent[]): void {
    this.#event ??= events.find(({ data }) => data !== "");
  }
}

/** An error in the first event of a stream, which the client can still get as an error. */
export interface StreamedError {
  /** The error's `code` where that is an HTTP status, else that of its type, else 502. */
  readonly status: number;
  readonly body: string;
}

/**
 * Reads the error that vLLM streams under status 200 for a failure before the first token.
 * Undefined where the event is none.
 */
export function streamedError({ name, data }: StreamEvent): StreamedError | undefined {
  const { error } = fieldsOf(data);
  if (name !== "error" && error == null) return undefined;
  const { code, type } = isObject(error) ? error : ({} as Fields);
  const isStatus = typeof code === "number" && Number.isInteger(code) && code >= 400 && code <= 599;
  return { status: isStatus ? code : (STATUS_OF_TYPE[String(type)] ?? 502), body: data.trim() };
}

/** HTTP statuses of the error types of the Messages API (vLLM 0.33, `translate_error_type`). */
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
