import { setImmediate as turn } from "node:timers/promises";
import {
  BodyQueue,
  type Endpoint,
  Upstream,
  type UpstreamAnswer,
  type UpstreamRequest,
} from "@kv/fleet/front-end";
import { vi } from "vitest";
import { upstream } from "../support/set-up.js";
import { decodeAnswer, prefillAnswer, type ScriptedAnswer } from "./answers.js";
import { type Cut, UNCUT } from "./cuts.js";

type Fields = Readonly<Record<string, unknown>>;

/** What the instances answer. */
export class Script {
  /** Of all answers. */
  cut: Cut = UNCUT;
  /** In place of the decode instance's own answer. */
  decode: (endpoint: Endpoint, body: Fields) => ScriptedAnswer = decodeAnswer;
  /** Of the longest answer since it was set. */
  lengthBytes = 0;

  /** The answer to a leg, and the pieces of its body. */
  answerTo(endpoint: Endpoint, body: Fields): CutAnswer {
    const asked = body.kv_transfer_params as Fields | undefined;
    const {
      status = 200,
      contentType,
      text,
    } = asked?.do_remote_decode === true ? prefillAnswer(endpoint) : this.decode(endpoint, body);
    const bytes = Buffer.from(text);
    this.lengthBytes = Math.max(this.lengthBytes, bytes.length);
    return { status, headers: { "content-type": contentType }, pieces: this.cut(bytes) };
  }
}

interface CutAnswer {
  readonly status: number;
  readonly headers: Readonly<Record<string, string>>;
  readonly pieces: readonly Buffer[];
}

/** The URLs of a prefill and of a decode instance. */
export type InstanceUrls = readonly [p: string, d: string];

/**
 * Stands in for the HTTP client of the router, so that each read ends exactly at a cut. Ends with
 * `vi.restoreAllMocks()`.
 */
export function replaceInstances(script: Script): InstanceUrls {
  const valve = { pause() {}, resume() {} };
  async function arrive(body: BodyQueue, pieces: readonly Buffer[]): Promise<void> {
    for (const piece of pieces) {
      // The reader has taken what came before.
      await turn();
      if (piece.length > 0) body.push(piece, valve);
    }
    await turn();
    body.end();
  }
  vi.spyOn(Upstream.prototype, "send").mockImplementation(async (request: UpstreamRequest) => {
    request.onSent?.();
    const { body: sent = "" } = request;
    const text = typeof sent === "string" ? sent : Buffer.concat(sent).toString();
    const { status, headers, pieces } = script.answerTo(
      request.path as Endpoint,
      JSON.parse(text) as Fields,
    );
    const body = new BodyQueue();
    if (pieces.length > 1) void arrive(body, pieces);
    else {
      for (const piece of pieces) body.push(piece, valve);
      body.end();
    }
    return { status, headers, body, discard() {} } satisfies UpstreamAnswer;
  });
  return ["http://p.example:1", "http://d.example:1"];
}

/**
 * Servers that write each piece when the router, which is in this process, has read the one before.
 * Ends with `vi.restoreAllMocks()`.
 */
export async function startInstances(script: Script): Promise<InstanceUrls> {
  let writtenBytes = 0;
  let readBytes = 0;
  const { push } = BodyQueue.prototype;
  vi.spyOn(BodyQueue.prototype, "push").mockImplementation(function (
    this: BodyQueue,
    chunk,
    sender,
  ) {
    readBytes += chunk.length;
    push.call(this, chunk, sender);
  });
  const started = [0, 1].map(() =>
    upstream(async ({ path, json, response }) => {
      const { status, headers, pieces } = script.answerTo(path as Endpoint, json);
      response.writeHead(status, headers);
      response.flushHeaders();
      for (const piece of pieces) {
        response.write(piece);
        writtenBytes += piece.length;
        while (readBytes < writtenBytes && !response.destroyed) await turn();
        await turn();
      }
      response.end();
    }),
  );
  const [p, d] = await Promise.all(started);
  return [p?.url ?? "", d?.url ?? ""];
}
