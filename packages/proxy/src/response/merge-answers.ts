import type { Instance } from "@kv/fleet";
import {
  answerHeaders,
  changedBodyHeaders,
  type Deadline,
  LEFT_OUT_HEADER,
} from "@kv/fleet/front-end";
import { EventFrames, isDone, isObject, type StreamEvent } from "@kv/http";
import { KvError } from "@kv/interface";
import type { ProxySettings } from "../config/settings.js";
import type { Legs } from "../legs/legs.js";
import type { RequestPart } from "../request/leg-bodies.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { withCachedTokens } from "./answer-filter.js";
import { type Fields, hideMembers } from "./answer-members.js";
import {
  type AnswerTarget,
  drained,
  type LegAnswer,
  parsedAnswer,
  readChunk,
  readWhole,
  validateChoices,
} from "./leg-answer.js";

/**
 * Merges all parts' answers into one for the client, and ends their visits. Only the instance of a
 * failed part counts a failure.
 * @throws `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function mergeAnswers(
  legs: Legs,
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<undefined> {
  try {
    if (parts.every(({ answer }) => answer.eventStream))
      await new StreamMerge(legs, client, parts).run();
    else await mergeJson(legs.settings, client, parts);
    for (const { answer } of parts) answer.visit.succeeded();
    return undefined;
  } catch (thrown) {
    for (const { answer } of parts) {
      answer.discard();
      answer.visit.abandoned();
    }
    throw client.deadline.reasonOr(thrown);
  }
}

/**
 * Choices in the order of prompts and copies, usage summed, other members from the first answer.
 */
async function mergeJson(
  { limits, timeouts }: ProxySettings,
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
): Promise<void> {
  const { response, requestId, record } = client;
  const budget: AnswerBudget = {
    leftBytes: limits.mergedAnswerLengthBytes,
    limit: "limits.mergedAnswerLengthBytes",
    leftOut: new Set(),
  };
  const bodies = await readAllParts(client, parts, (part) =>
    readJsonAnswer(part, budget, timeouts.stallMs),
  );
  const [first] = bodies;
  const choices = bodies
    .flatMap((body) => body.choices as Fields[])
    .map((choice, index) => ({ ...choice, index }));
  const usages = bodies.flatMap(({ usage }, at) =>
    usage == null ? [] : [{ usage: usage as Usage, copy: parts[at]?.copy ?? 0 }],
  );
  const merged: Record<string, unknown> = {
    ...first,
    id: mergedId(first?.id, parts[0], requestId),
    choices,
  };
  if (usages.length > 0) merged.usage = sumUsage(usages);
  // The metrics describe one part only.
  if (parts.length > 1 && "metrics" in merged) merged.metrics = null;
  const text = Buffer.from(JSON.stringify(merged));
  const headers = answerHeaders(changedBodyHeaders(parts[0]?.answer.headers ?? {}), requestId);
  headers["content-length"] = text.length;
  if (budget.leftOut.size > 0) headers[LEFT_OUT_HEADER] = [...budget.leftOut].join(", ");
  response.writeHead(200, headers);
  record.status = 200;
  record.answerLengthBytes = text.length;
  response.end(text);
}

interface AnswerBudget {
  leftBytes: number;
  readonly limit: string;
  readonly leftOut: Set<string>;
}

async function readJsonAnswer(
  part: AnsweredPart,
  budget: AnswerBudget,
  stallMs: number,
): Promise<Fields> {
  const { answer, deadline } = part;
  const { instance } = answer.visit;
  const bytes = await readWhole(answer, deadline, stallMs, budget);
  let fields = parsedAnswer(instance, bytes) as Fields;
  validateChoices(instance, fields, true);
  if (answer.cachedTokens !== undefined && fields.usage != null)
    fields = {
      ...fields,
      usage: withCachedTokens(fields.usage as Usage, await answer.cachedTokens()),
    };
  return hideMembers(fields, answer.kvFromPrefill, budget.leftOut);
}

interface PartState {
  readonly part: AnsweredPart;
  readonly index: number;
  isDone: boolean;
  hasChoice: boolean;
}

/**
 * Merges streams as events come, with one usage event and one `[DONE]`. Earlier events pass in
 * turns with other work: hundreds of parts may have ended.
 */
class StreamMerge {
  readonly #usages: { usage: Usage; copy: number; chunk: Fields }[] = [];
  /** All merged events have this `id` and `created`. */
  #identity: Fields | undefined;
  #lengthBytes = 0;
  #draining: Promise<void> | undefined;

  constructor(
    private readonly legs: Legs,
    private readonly client: AnswerTarget,
    private readonly parts: readonly AnsweredPart[],
  ) {}

  async run(): Promise<void> {
    try {
      await readAllParts(this.client, this.parts, (part, index) => this.#passPart(part, index));
      const last = this.#usages.find(({ copy }) => copy === 0);
      if (last !== undefined)
        await this.#writeEvent({ ...last.chunk, ...this.#identity, usage: sumUsage(this.#usages) });
      await this.#write("data: [DONE]\n\n");
      this.client.response.end();
    } finally {
      this.client.record.answerLengthBytes = this.#lengthBytes;
    }
  }

  async #passPart(part: AnsweredPart, index: number): Promise<void> {
    const { settings, fleet } = this.legs;
    const { limits, timeouts } = settings;
    const { answer } = part;
    const { instance } = answer.visit;
    const events = new EventFrames("utf8", limits.eventLengthBytes);
    const state: PartState = { part, index, isDone: false, hasChoice: false };
    await fleet.parses.turn();
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
      this.client.lastEvent = `data: ${JSON.stringify(hideMembers(chunk, false))}\n\n`;
      // The instance's message may repeat the prompt, and this one is logged.
      throw badAnswer(instance, "reported a failure in the middle of its stream");
    }
    this.#identity ??= {
      id: mergedId(chunk.id, part, this.client.requestId),
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
    const { response } = this.client;
    this.#begin();
    this.#lengthBytes += Buffer.byteLength(text);
    if (response.write(text)) return;
    this.#draining ??= this.#drained();
    await this.#draining;
  }

  /** Waits for the first event, so that an earlier failure can set an error status. */
  #begin(): void {
    const { response, record, requestId } = this.client;
    if (response.headersSent) return;
    const headers = changedBodyHeaders(this.parts[0]?.answer.headers ?? {});
    response.writeHead(200, answerHeaders(headers, requestId));
    record.status = 200;
    this.client.eventStreamStarted = true;
  }

  #drained(): Promise<void> {
    const { response, deadline } = this.client;
    return drained(response, deadline, this.legs.settings.timeouts.stallMs).finally(() => {
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

export interface AnsweredPart extends RequestPart {
  readonly requestId: string;
  readonly deadline: Deadline;
  readonly answer: LegAnswer;
}

/** Throws the first error; only the instance of its part counts a failure. */
function readAllParts<T>(
  client: AnswerTarget,
  parts: readonly AnsweredPart[],
  read: (part: AnsweredPart, index: number) => Promise<T>,
): Promise<T[]> {
  return Promise.all(
    parts.map(async (part, index) => {
      try {
        return await read(part, index);
      } catch (thrown) {
        const error = KvError.from(thrown, "KV_INTERNAL", "an answer could not be read");
        if (client.deadline.aborted) part.answer.visit.abandoned();
        else part.answer.visit.failed(error);
        throw error;
      }
    }),
  );
}

/** A part's answer id with the client's request id in it: `cmpl-ID-0` becomes `cmpl-ID`. */
function mergedId(id: unknown, part: AnsweredPart | undefined, requestId: string): unknown {
  return typeof id === "string" && part !== undefined
    ? id.replace(part.requestId, () => requestId)
    : id;
}

export type Usage = Record<string, unknown>;

/**
 * Counts as vLLM does: a prompt's tokens, also cached ones, once for all its copies, and the tokens
 * of each completion.
 */
function sumUsage(parts: readonly { readonly usage: Usage; readonly copy: number }[]): Usage {
  const sum = total(parts.map(({ usage }) => usage)) as Usage;
  for (const key of Object.keys(sum).filter((name) => name.startsWith("prompt")))
    sum[key] = total(parts.filter(({ copy }) => copy === 0).map(({ usage }) => usage[key]));
  if ("total_tokens" in sum)
    sum.total_tokens = Number(sum.prompt_tokens ?? 0) + Number(sum.completion_tokens ?? 0);
  return sum;
}

/** Adds numbers, also within objects. Of other values it keeps the first. */
export function total(values: readonly unknown[]): unknown {
  const [first = null, ...others] = values.filter((value) => value != null);
  if (typeof first === "number")
    return others.reduce((sum: number, value) => sum + Number(value), first);
  if (!isObject(first)) return first;
  const objects = [first, ...others.filter(isObject)];
  const keys = new Set(objects.flatMap(Object.keys));
  return Object.fromEntries(
    Array.from(keys, (key) => [key, total(objects.map((value) => value[key]))]),
  );
}
