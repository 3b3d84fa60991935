import { once } from "node:events";
import { KvError } from "@kv/interface";
import { badAnswer } from "./bad-answer.js";
import { whyEnded } from "./deadline.js";
import { createEndWatch } from "./event-stream.js";
import type { Exchange } from "./exchange.js";
import { answerHeaders } from "./headers.js";
import type { LegAnswer } from "./leg-order.js";

/**
 * Writes a decode worker's answer to the client, byte for byte and no faster than the client reads. An answer that does not come
 * to its end is an error here, and the caller's to break off.
 */
export async function relay(exchange: Exchange, answer: LegAnswer, stallMs: number): Promise<void> {
  const { response, deadline, requestId, trail } = exchange;
  const { visit, rest } = answer;
  const watch = createEndWatch(exchange.request.endpoint);
  const url = visit.instance.url;
  let lengthBytes = 0;

  async function write(chunk: Uint8Array): Promise<void> {
    watch.push(chunk);
    lengthBytes += chunk.byteLength;
    if (!response.write(chunk)) await once(response, "drain", { signal: deadline.signal });
  }
  async function next() {
    deadline.enter(`waiting for more from the decode instance ${url}`, stallMs);
    const result = await rest?.next();
    deadline.pause();
    return result;
  }

  try {
    response.writeHead(answer.status, answerHeaders(answer.headers, requestId));
    trail.status = answer.status;
    trail.eventStream = answer.eventStream;
    if (answer.held.length > 0) await write(answer.held);
    for (let result = await next(); result !== undefined && result.done !== true; result = await next()) {
      await write(result.value);
    }
    if (answer.eventStream && !watch.complete())
      throw badAnswer("decode", url, "ended its stream without its last event");
    response.end();
    if (answer.status >= 500) visit.failed(badAnswer("decode", url, `answered with status ${answer.status}`));
    else visit.succeeded();
  } catch (thrown) {
    answer.discard();
    const error = KvError.from(
      whyEnded(deadline, thrown),
      "KV_INTERNAL",
      "the answer could not be passed on",
    );
    if (deadline.signal.aborted) visit.abandoned();
    else visit.failed(error);
    throw error;
  } finally {
    trail.answerLengthBytes = lengthBytes;
  }
}
