import { answerHeaders, changedBodyHeaders } from "@kv/fleet/front-end";
import { EventFrames, isDone, type StreamEvent } from "@kv/http";
import type { YieldingQueue } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { hideMembers } from "./answer-members.js";
import { type AnsweredPart, mergedId, readAllParts } from "./answered-parts.js";
import { withCachedTokens } from "./cached-tokens.js";
import { type AnswerTarget, drained, readChunk } from "./leg-answer.js";
import { promptLogprobsMerger } from "./merge-prompt-logprobs.js";
import { isObject } from "./stream-rules.js";
import { sumUsage, type Usage } from "./sum-usage.js";

type Fields = Record<string, unknown>;
type Settings = Pick<ProxySettings, "limits" | "timeouts">;

/** How far the stream of a part has come. */
interface PartState {
  readonly part: AnsweredPart;
  /** Of its choice in the merged stream. */
  readonly index: number;
  readonly mergeLogprobs: (chunk: Fields) => Fields;
  isDone: boolean;
  hasChoice: boolean;
}

/**
 * Merges the event streams of a request's parts into one, as events come, with one usage event and
 * one `[DONE]`. What has come before the merge passes in `turns` with other work: that may be the
 * whole streams of hundreds of parts.
 */
export function mergeStreams(
  settings: Settings,
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
  turns: YieldingQueue,
): Promise<void> {
  return new StreamMerge(settings, client, parts, turns).run();
}

class StreamMerge {
  readonly #settings: Settings;
  readonly #client: AnswerTarget;
  readonly #parts: readonly AnsweredPart[];
  readonly #turns: YieldingQueue;
  readonly #usages: { usage: Usage; copy: number; chunk: Fields }[] = [];
  /** `id` and `created` of all events. */
  #identity: Fields | undefined = undefined;
  #lengthBytes = 0;
  #draining: Promise<void> | undefined = undefined;

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

  /** Passes the events of one part, with `index` as the index of their choice. */
  async #passPart(part: AnsweredPart, index: number): Promise<void> {
    const { limits, timeouts } = this.#settings;
    const { answer } = part;
    const { url } = answer.visit.instance;
    const events = new EventFrames("utf8", limits.eventLengthBytes);
    const state: PartState = {
      part,
      index,
      isDone: false,
      hasChoice: false,
      mergeLogprobs: promptLogprobsMerger(part.request, answer.promptAnswer),
    };
    await this.#turns.turn();
    let chunk: Uint8Array | undefined = answer.held;
    while (chunk !== undefined) {
      for (const event of events.push(chunk)) await this.#passEvent(state, event);
      if (events.problem !== undefined) throw badAnswer("decode", url, events.problem);
      chunk = await readChunk(answer, part.deadline, timeouts.stallMs);
    }
    for (const event of events.end()) await this.#passEvent(state, event);
    if (!state.isDone) throw badAnswer("decode", url, "ended its stream without [DONE]");
    if (!state.hasChoice) throw badAnswer("decode", url, "ended its stream without a choice");
  }

  async #passEvent(state: PartState, event: StreamEvent): Promise<void> {
    const { data } = event;
    if (data === "") return;
    const { part, index } = state;
    const { url } = part.answer.visit.instance;
    if (state.isDone)
      throw badAnswer("decode", url, "sent more after the last event of its stream");
    if (isDone(event)) {
      state.isDone = true;
      return;
    }
    const chunk = parseChunk(url, data);
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
      validateStreamedChoices(url, choices);
      state.hasChoice ||= choices.length > 0;
    }
    // An event has no member that is left out.
    const merged = state.mergeLogprobs(hideMembers(chunk, false));
    const own = Array.isArray(merged.choices)
      ? (merged.choices as Fields[]).map((choice) => ({ ...choice, index }))
      : merged.choices;
    await this.#writeEvent({ ...merged, ...this.#identity, choices: own });
  }

  #writeEvent(event: Fields): Promise<void> {
    return this.#write(`data: ${JSON.stringify(event)}\n\n`);
  }

  async #write(text: string): Promise<void> {
    const { response, record } = this.#client;
    // The head leaves with the first event: until then a failure can be answered with an error
    // status.
    if (!response.headersSent) {
      const headers = changedBodyHeaders(this.#parts[0]?.answer.headers ?? {});
      response.writeHead(200, answerHeaders(headers, this.#client.requestId));
      record.status = 200;
      this.#client.eventStreamStarted = true;
    }
    this.#lengthBytes += Buffer.byteLength(text);
    if (response.write(text)) return;
    this.#draining ??= this.#drained();
    await this.#draining;
  }

  /** Resolves when the client has read what was written. Rejects with the deadline's reason. */
  #drained(): Promise<void> {
    const { response, deadline } = this.#client;
    return drained(response, deadline, this.#settings.timeouts.stallMs).finally(() => {
      this.#draining = undefined;
    });
  }
}

function parseChunk(url: string, data: string): Fields {
  let chunk: Fields;
  try {
    chunk = JSON.parse(data) as Fields;
  } catch (cause) {
    throw badAnswer("decode", url, "sent an event that is not JSON", cause);
  }
  if (chunk.error !== undefined) {
    // Its message may repeat the prompt, and this one is logged.
    throw badAnswer("decode", url, "reported a failure in the middle of its stream");
  }
  return chunk;
}

/**
 * Checks the choices of one event of a part's stream, which may have none.
 * @throws `KV_PROXY_UPSTREAM_FAILED`.
 */
function validateStreamedChoices(url: string, choices: readonly unknown[]): void {
  const other = choices.find((choice) => !isObject(choice) || (choice.index ?? 0) !== 0);
  if (other !== undefined || choices.length > 1)
    throw badAnswer("decode", url, "streamed more than the one choice that was requested");
}
