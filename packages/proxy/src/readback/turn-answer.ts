import type { Instance } from "@kv/fleet";
import { changedBodyHeaders } from "@kv/fleet/front-end";
import { rawMember } from "../request/json-members.js";
import { asBuffer } from "../response/event-stream.js";
import { isObject, type LegAnswer } from "../response/leg-answer.js";

/** What a D says about a turn that has ended. */
export interface EndedTurn {
  readonly instance: Instance;
  /** D's `kv_transfer_params`, as it wrote them (JSON text). */
  readonly params: string;
  /** Token ids of the prompt, and of the answer; as far as D has told them. */
  readonly promptIds: readonly number[];
  readonly outputIds: readonly number[];
}

export interface TurnAnswerOptions {
  /** The client has not asked for token ids, so it does not get them. */
  readonly hidesIds: boolean;
  /** Called when D has named the KV of the turn. */
  readonly ended: (turn: EndedTurn) => void;
}

/**
 * Reads the token ids and the `kv_transfer_params` of D's answer as it passes. `begin`: the bytes
 * that D has sent first. Returns the answer for the client.
 */
export function readTurnAnswer(
  answer: LegAnswer,
  begin: Buffer,
  options: TurnAnswerOptions,
): LegAnswer {
  if (answer.status !== 200) return answer;
  const reader = new TurnReader(answer.visit.instance, options.ended);
  const { hidesIds } = options;
  if (!answer.eventStream && answer.rest === undefined) {
    reader.read(begin.toString("latin1"));
    return hidesIds
      ? { ...answer, headers: changedBodyHeaders(answer.headers), held: hideIds(answer.held) }
      : answer;
  }
  const lines = new TurnLines(reader, hidesIds);
  const { rest } = answer;
  if (rest === undefined) {
    const held = Buffer.concat([lines.push(answer.held), lines.end()]);
    return { ...answer, headers: changedBodyHeaders(answer.headers), held };
  }
  return {
    ...answer,
    headers: changedBodyHeaders(answer.headers),
    held: lines.push(answer.held),
    rest: {
      async next() {
        for (;;) {
          const { done, value } = await rest.next();
          const passing = done === true ? lines.end() : lines.push(value);
          if (passing.length > 0) return { done: false, value: passing };
          if (done === true) return { done, value: undefined };
        }
      },
    },
  };
}

/** The longest line that is read: the ids of a prompt of millions of tokens. */
const MAX_LINE_BYTES = 64 * 1024 * 1024;
const LF = 0x0a;

/** The lines of a stream, or of an unstreamed answer in pieces. A line passes when it has ended. */
class TurnLines {
  readonly #reader: TurnReader;
  readonly #hidesIds: boolean;
  #held: Buffer[] = [];
  #heldBytes = 0;

  constructor(reader: TurnReader, hidesIds: boolean) {
    this.#reader = reader;
    this.#hidesIds = hidesIds;
  }

  /** Returns the lines that end in this chunk. */
  push(chunk: Uint8Array): Buffer {
    const bytes = asBuffer(chunk);
    const end = bytes.lastIndexOf(LF) + 1;
    if (end > 0) {
      const lines = Buffer.concat([...this.#held, bytes.subarray(0, end)]);
      this.#held = [];
      this.#heldBytes = 0;
      this.#hold(bytes.subarray(end));
      return this.#pass(lines);
    }
    this.#hold(bytes);
    return this.#heldBytes > MAX_LINE_BYTES ? this.end() : Buffer.alloc(0);
  }

  /** The stream has ended. Returns the line that was held. */
  end(): Buffer {
    const line = Buffer.concat(this.#held);
    this.#held = [];
    this.#heldBytes = 0;
    return this.#pass(line);
  }

  #hold(bytes: Buffer): void {
    if (bytes.length > 0) this.#held.push(bytes);
    this.#heldBytes += bytes.length;
  }

  #pass(bytes: Buffer): Buffer {
    for (const line of bytes.toString("latin1").split(/[\r\n]+/)) {
      const text = line.startsWith("data:") ? line.slice("data:".length).trim() : line;
      if (text.startsWith("{")) this.#reader.read(text);
    }
    return this.#hidesIds ? hideIds(bytes) : bytes;
  }
}

type Fields = Readonly<Record<string, unknown>>;

/**
 * Collects the token ids of one answer. All texts are read a character for each byte: what is read
 * has no others.
 */
class TurnReader {
  readonly #instance: Instance;
  readonly #ended: (turn: EndedTurn) => void;
  #promptIds: readonly number[] = [];
  readonly #outputIds: number[] = [];
  #isDone = false;

  constructor(instance: Instance, ended: (turn: EndedTurn) => void) {
    this.#instance = instance;
    this.#ended = ended;
  }

  /** Reads an event, or a whole answer. */
  read(text: string): void {
    if (this.#isDone || !(text.includes("token_ids") || text.includes("kv_transfer_params")))
      return;
    let body: Fields;
    try {
      body = JSON.parse(text) as Fields;
    } catch {
      // The check of the answer reports it.
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
    this.#ended({
      instance: this.#instance,
      params,
      promptIds: this.#promptIds,
      outputIds: this.#outputIds,
    });
  }
}

/**
 * The `kv_transfer_params` of an answer as D wrote them. The Responses API has them inside of its
 * response.
 */
function paramsIn(body: Fields, text: string): string | undefined {
  if (isObject(body.kv_transfer_params)) return rawMember(text, "kv_transfer_params");
  if (!isObject(body.response) || !isObject(body.response.kv_transfer_params)) return undefined;
  return rawMember(rawMember(text, "response") ?? "{}", "kv_transfer_params");
}

/** Lists of token ids. Quotes inside of strings are escaped, so no string has such a member. */
const IDS = /("(?:prompt_)?token_ids"\s*:\s*)\[[0-9,\s]*\]/g;

/** Writes `null` for lists of token ids, as vLLM writes it where they were not asked for. */
function hideIds(bytes: Buffer): Buffer {
  const text = bytes.toString("latin1");
  return text.includes('token_ids"') ? Buffer.from(text.replace(IDS, "$1null"), "latin1") : bytes;
}

function isIds(value: unknown): value is readonly number[] {
  return (
    Array.isArray(value) && value.every((id) => Number.isInteger(id) && id >= 0 && id < 2 ** 31)
  );
}
