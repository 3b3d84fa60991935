import type { ServerResponse } from "node:http";
import type { Deadline } from "@kv/fleet/front-end";
import { answerHeaders } from "@kv/fleet/front-end";
import { KvError } from "@kv/interface";
import type { ClientRequest } from "../flow/client-request.js";
import { badAnswer } from "../upstream/upstream-errors.js";
import { type LegAnswer, readChunk } from "./leg-answer.js";
import { StreamWatch } from "./stream-watch.js";

/** Longer answers leave in pieces of this length, so that a client that reads slowly is told from one that does not read. */
const PIECE_BYTES = 256 * 1024;
/** Up to this length Node writes a string together with the headers, without a copy on the heap. */
const SINGLE_WRITE_BYTES = 8 * 1024;

/** Resolves when the client has read what was written. The deadline aborts when it reads nothing for `stallMs`; rejects with the reason. */
export function drained(response: ServerResponse, deadline: Deadline, stallMs: number): Promise<void> {
  deadline.startPhase("waiting for the client to read its answer", stallMs);
  return new Promise((resolve, reject) => {
    const onDrain = () => {
      deadline.endPhase();
      stopListening();
      resolve();
    };
    response.once("drain", onDrain);
    const stopListening = deadline.onAbort(() => {
      response.off("drain", onDrain);
      reject(deadline.reason);
    });
  });
}

/**
 * Writes one instance's answer to the client, byte for byte and no faster than the client reads, and ends the visit. Returns the failure
 * that the instance reported in its stream: the client has received it, and the request counts as failed. An answer that breaks off is an
 * error. Errors: `KV_PROXY_UPSTREAM_FAILED`, the deadline's reason.
 */
export async function streamResponse(
  client: ClientRequest,
  answer: LegAnswer,
  stallMs: number,
): Promise<KvError | undefined> {
  const { response, deadline, requestId, record } = client;
  const { visit, rest, eventStream, onePart } = answer;
  const { role, url } = visit.instance;
  const watch =
    eventStream && answer.status === 200 ? new StreamWatch(client.request.endpoint, onePart) : undefined;
  let lengthBytes = 0;

  async function write(chunk: Uint8Array): Promise<void> {
    lengthBytes += chunk.byteLength;
    if (chunk.byteLength > 0 && !response.write(chunk)) await drained(response, deadline, stallMs);
  }
  /** Errors: `KV_PROXY_UPSTREAM_FAILED` for a problem of the stream. */
  function requireNoProblem(): void {
    if (watch?.problem !== undefined) throw badAnswer(role, url, watch.problem);
  }
  async function end(bytes: Buffer): Promise<void> {
    let at = 0;
    for (; bytes.length - at > PIECE_BYTES; at += PIECE_BYTES) {
      if (!response.write(bytes.subarray(at, at + PIECE_BYTES))) await drained(response, deadline, stallMs);
    }
    response.end(bytes.subarray(at));
  }

  try {
    const headers = answerHeaders(answer.headers, requestId);
    record.status = answer.status;
    if (rest === undefined) {
      lengthBytes = answer.held.length;
      watch?.push(answer.held);
      watch?.end();
      // Nothing has left yet, so a problem can still be answered with an error status.
      requireNoProblem();
      headers["content-length"] = answer.held.length;
      response.writeHead(answer.status, headers);
      // Latin-1 maps each byte to one character.
      if (answer.held.length <= SINGLE_WRITE_BYTES) response.end(answer.held.toString("latin1"), "latin1");
      else await end(answer.held);
    } else {
      // A stream may end with an error event that the instance has not counted.
      if (eventStream) delete headers["content-length"];
      response.writeHead(answer.status, headers);
      client.eventStreamStarted = eventStream;
      let chunk: Uint8Array | undefined = answer.held;
      while (chunk !== undefined) {
        await write(watch?.push(chunk) ?? chunk);
        requireNoProblem();
        chunk = await readChunk(answer, deadline, stallMs);
      }
      if (watch !== undefined) await write(watch.end());
      requireNoProblem();
      response.end();
    }
    const reported = watch?.failed
      ? badAnswer(role, url, "reported a failure in the middle of its stream")
      : undefined;
    if (reported !== undefined) visit.failed(reported);
    else if (answer.status >= 500)
      visit.failed(badAnswer(role, url, `answered with status ${answer.status}`));
    else visit.succeeded();
    return reported;
  } catch (thrown) {
    answer.discard();
    const error = KvError.from(deadline.reasonOr(thrown), "KV_INTERNAL", "the answer could not be passed on");
    if (deadline.aborted) visit.abandoned();
    else visit.failed(error);
    throw error;
  } finally {
    record.answerLengthBytes = lengthBytes;
  }
}
