import { answerHeaders } from "@kv/fleet/front-end";
import type { ProxySettings } from "../config/settings.js";
import type { ClientRequest } from "../flow/client-request.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { type AnsweredPart, mergedId, readAllParts } from "./answered-parts.js";
import { EventReader } from "./event-stream.js";
import { readChunk, validateStreamedChoices } from "./leg-answer.js";
import { promptLogprobsMerger } from "./merge-prompt-logprobs.js";
import { drained } from "./stream-response.js";
import { sumUsage, type Usage } from "./sum-usage.js";

type Fields = Record<string, unknown>;
type Settings = Pick<ProxySettings, "limits" | "timeouts">;

/** Merges the event streams of a request's parts into one, as events come, with one usage event and one `[DONE]`. */
export function mergeStreams(
  settings: Settings,
  client: ClientRequest,
  parts: readonly AnsweredPart[],
): Promise<void> {
  return new StreamMerge(settings, client, parts).run();
}

class StreamMerge {
  readonly #settings: Settings;
  readonly #client: ClientRequest;
  readonly #parts: readonly AnsweredPart[];
  readonly #usages: { usage: Usage; copy: number; chunk: Fields }[] = [];
  /** `id` and `created` of all events. */
  #identity: Fields | undefined = undefined;
  #lengthBytes = 0;
  #draining: Promise<void> | undefined = undefined;

  constructor(settings: Settings, client: ClientRequest, parts: readonly AnsweredPart[]) {
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
    const events = new EventReader(limits.eventLengthBytes);
    const mergeLogprobs = promptLogprobsMerger(part.request, answer.promptAnswer);
    const seen = { done: false, choice: false };
    let bytes: Uint8Array | undefined = answer.held;
    while (bytes !== undefined) {
      for (const data of events.push(bytes)) {
        if (seen.done) throw badAnswer("decode", url, "sent more after the last event of its stream");
        if (data === "[DONE]") {
          seen.done = true;
          continue;
        }
        const chunk = parseChunk(url, data);
        this.#identity ??= {
          id: mergedId(chunk.id, this.#parts[0], this.#client.requestId),
          created: chunk.created,
        };
        if (Array.isArray(chunk.choices) && chunk.choices.length === 0 && chunk.usage != null) {
          this.#usages.push({ usage: chunk.usage as Usage, copy: part.copy, chunk });
          continue;
        }
        if (Array.isArray(chunk.choices)) {
          validateStreamedChoices(url, chunk.choices);
          seen.choice ||= chunk.choices.length > 0;
        }
        const merged = mergeLogprobs(chunk);
        const choices = Array.isArray(merged.choices)
          ? (merged.choices as Fields[]).map((choice) => ({ ...choice, index }))
          : merged.choices;
        await this.#writeEvent({ ...merged, ...this.#identity, choices });
      }
      bytes = await readChunk(answer, part.deadline, timeouts.stallMs);
    }
    if (!seen.done) throw badAnswer("decode", url, "ended its stream without [DONE]");
    if (!seen.choice) throw badAnswer("decode", url, "ended its stream without a choice");
  }

  #writeEvent(event: Fields): Promise<void> {
    return this.#write(`data: ${JSON.stringify(event)}\n\n`);
  }

  async #write(text: string): Promise<void> {
    const { response, record } = this.#client;
    // The head leaves with the first event: until then a failure can be answered with an error status.
    if (!response.headersSent) {
      response.writeHead(200, answerHeaders(this.#parts[0]?.answer.headers ?? {}, this.#client.requestId));
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
