import { once } from "node:events";
import { KvError } from "@kv/interface";
import { badAnswer } from "./bad-answer.js";
import { whyEnded } from "./deadline.js";
import { createStreamWatch } from "./event-stream.js";
import type { Exchange } from "./exchange.js";
import { answerHeaders } from "./headers.js";
import type { LegAnswer } from "./leg-order.js";
import { nextPiece } from "./next-piece.js";

/** Up to here Node writes a string without a copy on the heap. */
const ONE_WRITE_BYTES = 8 * 1024;

/**
 * Writes a decode worker's answer to the client, byte for byte and no faster than the client reads. An answer that does not come
 * to its end is an error here, and the caller's to break off.
 */
export async function relay(exchange: Exchange, answer: LegAnswer, stallMs: number): Promise<void> {
  const { response, deadline, requestId, trail } = exchange;
  const { visit, rest } = answer;
  const watch = createStreamWatch(exchange.request.endpoint);
  const { role, url } = visit.instance;
  const watched = answer.eventStream && answer.status === 200;
  let lengthBytes = 0;

  function keep(chunk: Uint8Array): void {
    lengthBytes += chunk.byteLength;
    if (!watched) return;
    watch.push(chunk);
    // Before the end leaves, so that the client does not take it for one.
    if (!watch.answered() && !watch.failed() && watch.complete())
      throw badAnswer(role, url, "ended its stream without a choice");
  }
  async function write(chunk: Uint8Array): Promise<void> {
    keep(chunk);
    if (!response.write(chunk)) await once(response, "drain", { signal: deadline.signal });
  }
  const next = () => nextPiece(answer, deadline, stallMs);
  function refuseCut(): void {
    if (watched && !watch.complete()) throw badAnswer(role, url, "ended its stream without its last event");
  }

  try {
    const headers = answerHeaders(answer.headers, requestId);
    trail.status = answer.status;
    if (rest === undefined) {
      keep(answer.held);
      // All of it is there, and nothing has left: an end that is missing is still an error with a status.
      refuseCut();
      headers["content-length"] = answer.held.length;
      response.writeHead(answer.status, headers);
      // As a string it leaves in one write with the headers; latin1 is one byte for each character.
      if (answer.held.length <= ONE_WRITE_BYTES) response.end(answer.held.toString("latin1"), "latin1");
      else response.end(answer.held);
    } else {
      response.writeHead(answer.status, headers);
      trail.eventStream = answer.eventStream;
      if (answer.held.length > 0) await write(answer.held);
      for (let piece = await next(); piece !== undefined; piece = await next()) await write(piece);
      refuseCut();
      response.end();
    }
    // The client has the instance's own words, and its own end.
    if (watch.failed()) trail.failure = badAnswer(role, url, "told of a failure in the middle of its stream");
    if (trail.failure !== undefined) visit.failed(trail.failure);
    else if (answer.status >= 500)
      visit.failed(badAnswer(role, url, `answered with status ${answer.status}`));
    else visit.succeeded();
  } catch (thrown) {
    answer.discard();
    const error = KvError.from(
      whyEnded(deadline, thrown),
      "KV_INTERNAL",
      "the answer could not be passed on",
    );
    if (deadline.ended) visit.abandoned();
    else visit.failed(error);
    throw error;
  } finally {
    trail.answerLengthBytes = lengthBytes;
  }
}
