import type { Instance } from "@kv/fleet";
import { answerHeaders, changedBodyHeaders } from "@kv/fleet/front-end";
import { EventFrames, isDone, type StreamEvent } from "@kv/http";
import type { YieldingQueue } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { isObject, withCachedTokens } from "./answer-filter.js";
import { type Fields, hideMembers } from "./answer-members.js";
import {
  type AnsweredPart,
  mergedId,
  readAllParts,
  sumUsage,
  type Usage,
} from "./answered-parts.js";
import { type AnswerTarget, drained, readChunk } from "./leg-answer.js";

type Settings = Pick<ProxySettings, "limits" | "timeouts">;

interface PartState {
  readonly part: AnsweredPart;
  readonly index: number;
  isDone: boolean;
  hasChoice: boolean;
}

/**
 * Merges streams as events come, with one usage event and one `[DONE]`. Earlier events pass in
 * `turns` with other work: hundreds of parts may have ended.
 */
export class StreamMerge {
  readonly #settings: Settings;
  readonly #client: AnswerTarget;
  readonly #parts: readonly AnsweredPart[];
  readonly #turns: YieldingQueue;
  readonly #usages: { usage: Usage; copy: number; chunk: Fields }[] = [];
  /** All merged events have this `id` and `created`. */
  #identity: Fields | undefined;
  #lengthBytes = 0;
  #draining: Promise<void> | undefined;

  constructor(
    settings: Settings,
    client: AnswerTarget,
    parts: readonly AnsweredPart[],
    turns: YieldingQueue,
  ) {
    this.#turns = turns;
    this.#settings = settings;
    this.#client = client;
    this.#parts = parts;
  }

  async run(): Promise<void> {
    try {
      await readAllParts(this.#parts, (part, index) => this.#passPart(part, index));
      const last = this.#usages.find(({ copy }) => copy === 0);
      if (last !== undefined)
        await this.#writeEvent({ ...last.chunk, ...this.#identity, usage: sumUsage(this.#usages) });
      await this.#write("data: [DONE]\n\n");
      this.#client.response.end();
    } finally {
      this.#client.record.answerLengthBytes = this.#lengthBytes;
    }
  }

  async #passPart(part: AnsweredPart, index: number): Promise<void> {
    const { limits, timeouts } = this.#settings;
    const { answer } = part;
    const { instance } = answer.visit;
    const events = new EventFrames("utf8", limits.eventLengthBytes);
    const state: PartState = { part, index, isDone: false, hasChoice: false };
    await this.#turns.turn();
    let chunk: Uint8Array | undefined = answer.held;
    while (chunk !== undefined) {
      for (const event of events.push(chunk)) await this.#passEvent(state, event);
      if (events.problem !== undefined) throw badAnswer(instance, events.problem);
      chunk = await readChunk(answer, part.deadline, timeouts.stallMs);
    }
    for (const event of events.end()) await this.#passEvent(state, event);
    if (!state.isDone) throw badAnswer(instance, "ended its stream without [DONE]");
    if (!state.hasChoice) throw badAnswer(instance, "ended its stream without a choice");
  }

  async #passEvent(state: PartState, event: StreamEvent): Promise<void> {
    const { data } = event;
    if (data === "") return;
    const { part, index } = state;
    const { instance } = part.answer.visit;
    if (state.isDone) throw badAnswer(instance, "sent more after the last event of its stream");
    if (isDone(event)) {
      state.isDone = true;
      return;
    }
    const chunk = parseChunk(instance, data);
    if (chunk.error !== undefined) {
      this.#begin();
      this.#client.lastEvent = `data: ${JSON.stringify(hideMembers(chunk, false))}\n\n`;
      // The instance's message may repeat the prompt, and this one is logged.
      throw badAnswer(instance, "reported a failure in the middle of its stream");
    }
    this.#identity ??= {
      id: mergedId(chunk.id, part, this.#client.requestId),
      created: chunk.created,
    };
    const { choices } = chunk;
    if (Array.isArray(choices) && choices.length === 0 && chunk.usage != null) {
      const { cachedTokens } = part.answer;
      const given = chunk.usage as Usage;
      const usage =
        cachedTokens === undefined ? given : withCachedTokens(given, await cachedTokens());
      this.#usages.push({ usage, copy: part.copy, chunk });
      return;
    }
    if (Array.isArray(choices)) {
      validateStreamedChoices(instance, choices);
      state.hasChoice ||= choices.length > 0;
    }
    // Events have no member that is left out.
    const merged = hideMembers(chunk, false);
    const own = Array.isArray(merged.choices)
      ? (merged.choices as Fields[]).map((choice) => ({ ...choice, index }))
      : merged.choices;
    await this.#writeEvent({ ...merged, ...this.#identity, choices: own });
  }

  #writeEvent(event: Fields): Promise<void> {
    return this.#write(`data: ${JSON.stringify(event)}\n\n`);
  }

  async #write(text: string): Promise<void> {
    const { response } = this.#client;
    this.#begin();
    this.#lengthBytes += Buffer.byteLength(text);
    if (response.write(text)) return;
    this.#draining ??= this.#drained();
    await this.#draining;
  }

  /** Waits for the first event, so that an earlier failure can set an error status. */
  #begin(): void {
    const { response, record, requestId } = this.#client;
    if (response.headersSent) return;
    const headers = changedBodyHeaders(this.#parts[0]?.answer.headers ?? {});
    response.writeHead(200, answerHeaders(headers, requestId));
    record.status = 200;
    this.#client.eventStreamStarted = true;
  }

  #drained(): Promise<void> {
    const { response, deadline } = this.#client;
    return drained(response, deadline, this.#settings.timeouts.stallMs).finally(() => {
      this.#draining = undefined;
    });
  }
}

function parseChunk(instance: Instance, data: string): Fields {
  try {
    return JSON.parse(data) as Fields;
  } catch (cause) {
    throw badAnswer(instance, "sent an event that is not JSON", cause);
  }
}

/** @throws `KV_PROXY_UPSTREAM_FAILED`. */
function validateStreamedChoices(instance: Instance, choices: readonly unknown[]): void {
  const other = choices.find((choice) => !isObject(choice) || (choice.index ?? 0) !== 0);
  if (other !== undefined || choices.length > 1)
    throw badAnswer(instance, "streamed more than the one choice that was requested");
}
