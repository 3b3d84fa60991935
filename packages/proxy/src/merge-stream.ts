import { badAnswer } from "./bad-answer.js";
import { refuseForeignChoices } from "./choices.js";
import { createEventReader } from "./event-reader.js";
import type { Exchange } from "./exchange.js";
import type { GatheredPart } from "./gather.js";
import { answerHeaders } from "./headers.js";
import type { LegOrderOptions } from "./leg-order.js";
import { wholeId } from "./merge-json.js";
import { nextPiece } from "./next-piece.js";
import { graftStream } from "./prompt-graft.js";
import { sumUsage, type Usage } from "./usage.js";

type Fields = Record<string, unknown>;

/** One stream of several: events as they come, each under the index of its part, one usage and one `[DONE]` at the end. */
export async function mergeStreams(
  { limits, timeouts }: LegOrderOptions,
  exchange: Exchange,
  parts: readonly GatheredPart[],
): Promise<void> {
  const { response, requestId, trail, deadline } = exchange;
  const headers = answerHeaders(parts[0]?.answer.headers ?? {}, requestId);
  let lengthBytes = 0;
  let draining: Promise<void> | undefined;
  let identity: Fields | undefined;
  const usages: { usage: Usage; copy: number; chunk: Fields }[] = [];

  async function write(text: string): Promise<void> {
    // Not before: what fails without a byte of an answer is told by its status.
    if (!response.headersSent) {
      response.writeHead(200, headers);
      trail.status = 200;
      trail.eventStream = true;
    }
    lengthBytes += Buffer.byteLength(text);
    if (response.write(text)) return;
    draining ??= drained();
    await draining;
  }
  function drained(): Promise<void> {
    return new Promise((resolve, reject) => {
      const leave = deadline.onEnd(() => reject(deadline.reason));
      response.once("drain", () => {
        leave();
        draining = undefined;
        resolve();
      });
    });
  }

  async function pass(part: GatheredPart, index: number): Promise<void> {
    const { answer } = part;
    const { url } = answer.visit.instance;
    const events = createEventReader(limits.eventLengthBytes);
    const graft = graftStream(part.request, answer.promptAnswer);
    let complete = false;
    let answered = false;

    async function take(bytes: Uint8Array): Promise<void> {
      for (const data of events.push(bytes)) {
        if (data === "[DONE]") {
          complete = true;
          continue;
        }
        const chunk = readChunk(url, data);
        identity ??= { id: wholeId(chunk.id, parts[0], requestId), created: chunk.created };
        if (Array.isArray(chunk.choices) && chunk.choices.length === 0 && chunk.usage != null) {
          usages.push({ usage: chunk.usage as Usage, copy: part.copy, chunk });
          continue;
        }
        if (Array.isArray(chunk.choices)) {
          refuseForeignChoices(url, chunk.choices);
          answered ||= chunk.choices.length > 0;
        }
        const own = graft(chunk);
        const choices = Array.isArray(own.choices)
          ? (own.choices as Fields[]).map((choice) => ({ ...choice, index }))
          : own.choices;
        await write(`data: ${JSON.stringify({ ...own, ...identity, choices })}\n\n`);
      }
    }

    const next = () => nextPiece(answer, part.deadline, timeouts.stallMs);
    for (let piece: Uint8Array | undefined = answer.held; piece !== undefined; piece = await next())
      await take(piece);
    if (!complete) throw badAnswer("decode", url, "ended its stream without [DONE]");
    if (!answered) throw badAnswer("decode", url, "ended its stream without a choice");
  }

  try {
    await Promise.all(parts.map(pass));
    const last = usages.find(({ copy }) => copy === 0);
    if (last !== undefined)
      await write(`data: ${JSON.stringify({ ...last.chunk, ...identity, usage: sumUsage(usages) })}\n\n`);
    await write("data: [DONE]\n\n");
    response.end();
  } finally {
    trail.answerLengthBytes = lengthBytes;
  }
}

function readChunk(url: string, data: string): Fields {
  let chunk: Fields;
  try {
    chunk = JSON.parse(data) as Fields;
  } catch (cause) {
    throw badAnswer("decode", url, "sent an event that is not JSON", cause);
  }
  if (chunk.error !== undefined) {
    const { message } = (chunk.error ?? {}) as { message?: unknown };
    throw badAnswer("decode", url, `failed in mid-stream: ${String(message)}`);
  }
  return chunk;
}
