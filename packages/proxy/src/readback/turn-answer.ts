import type { Instance } from "@kv/fleet";
import { changedBodyHeaders } from "@kv/fleet/front-end";
import { EventFrames, isObject, rawMember, type StreamEvent } from "@kv/http";
import type { Fields } from "../response/answer-members.js";
import type { LegAnswer } from "../response/leg-answer.js";
import { badAnswer } from "../upstream/upstream-errors.js";

export interface EndedTurn {
  readonly instance: Instance;
  /** D's `kv_transfer_params` as it wrote them (JSON text). */
  readonly params: string;
  /** Empty or short where D did not tell all ids. */
  readonly promptIds: readonly number[];
  readonly outputIds: readonly number[];
}

export interface TurnAnswerOptions {
  /** The client did not ask for token ids. */
  readonly hidesIds: boolean;
  readonly ended: (turn: EndedTurn) => void;
}

/** Returns the client's answer, whose token ids and `kv_transfer_params` are read as it passes. */
export function readTurnAnswer(answer: LegAnswer, options: TurnAnswerOptions): LegAnswer {
  const { status, held, rest } = answer;
  if (status !== 200) return answer;
  const reader = new TurnReader(answer, options);
  const headers = options.hidesIds ? changedBodyHeaders(answer.headers) : answer.headers;
  const begin = reader.push(held);
  if (rest === undefined) return { ...answer, headers, held: Buffer.concat([begin, reader.end()]) };
  return {
    ...answer,
    headers,
    held: begin,
    rest: {
      async next() {
        for (;;) {
          const { done, value } = await rest.next();
          const passing = done === true ? reader.end() : reader.push(value);
          if (passing.length > 0) return { done: false, value: passing };
          if (done === true) return { done, value: undefined };
        }
      },
    },
  };
}

/** Texts hold one character per byte, enough for what is read. */
class TurnReader {
  /** An unstreamed answer is one event. */
  readonly #events = new EventFrames("latin1");
  #promptIds: readonly number[] = [];
  readonly #outputIds: number[] = [];
  #isDone = false;

  constructor(
    private readonly answer: LegAnswer,
    private readonly options: TurnAnswerOptions,
  ) {}

  /** @throws `KV_PROXY_UPSTREAM_FAILED` for an event that is too long. */
  push(chunk: Uint8Array): Buffer {
    return this.#pass(this.#events.push(chunk));
  }

  end(): Buffer {
    return this.#pass(this.#events.end());
  }

  #pass(events: readonly StreamEvent[]): Buffer {
    const { eventStream, visit } = this.answer;
    const { problem } = this.#events;
    if (problem !== undefined) throw badAnswer(visit.instance, problem);
    for (const { bytes, data } of events) this.#read(eventStream ? data : bytes.toString("latin1"));
    const bytes = Buffer.concat(events.map((event) => event.bytes));
    return this.options.hidesIds ? hideIds(bytes) : bytes;
  }

  #read(text: string): void {
    if (this.#isDone || !(text.includes("token_ids") || text.includes("kv_transfer_params")))
      return;
    let body: Fields;
    try {
      body = JSON.parse(text) as Fields;
    } catch {
      // The check of the answer reports the fault.
      return;
    }
    const [choice] = (
      Array.isArray(body.choices) ? body.choices : []
    ) as readonly (Fields | null)[];
    const promptIds = body.prompt_token_ids ?? choice?.prompt_token_ids;
    if (isIds(promptIds)) this.#promptIds = promptIds;
    if (isIds(choice?.token_ids)) for (const id of choice.token_ids) this.#outputIds.push(id);
    const params = paramsIn(body, text);
    if (params === undefined) return;
    this.#isDone = true;
    this.options.ended({
      instance: this.answer.visit.instance,
      params,
      promptIds: this.#promptIds,
      outputIds: this.#outputIds,
    });
  }
}

/** `kv_transfer_params` as D wrote them. The Responses API nests them in its response. */
function paramsIn(body: Fields, text: string): string | undefined {
  if (isObject(body.kv_transfer_params)) return rawMember(text, "kv_transfer_params");
  if (!isObject(body.response) || !isObject(body.response.kv_transfer_params)) return undefined;
  return rawMember(rawMember(text, "response") ?? "{}", "kv_transfer_params");
}

/** Lists of token ids. Quotes in strings are escaped, so no string matches. */
const IDS = /("(?:prompt_)?token_ids"\s*:\s*)\[[0-9,\s]*\]/g;

/** Replaces lists of token ids by `null`, as vLLM writes them unasked. */
function hideIds(bytes: Buffer): Buffer {
  const text = bytes.toString("latin1");
  return text.includes('token_ids"') ? Buffer.from(text.replace(IDS, "$1null"), "latin1") : bytes;
}

function isIds(value: unknown): value is readonly number[] {
  return (
    Array.isArray(value) && value.every((id) => Number.isInteger(id) && id >= 0 && id < 2 ** 31)
  );
}
