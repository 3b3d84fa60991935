import { setImmediate as turn } from "node:timers/promises";
import { BodyQueue, type Endpoint } from "@kv/fleet/front-end";
import type { Answer, FakeUpstream } from "@kv/testing/http/fake-upstream";
import { vi } from "vitest";
import { upstream } from "../support/set-up.js";
import { decodeAnswer, prefillAnswer } from "./answers.js";
import { type Cut, UNCUT } from "./cuts.js";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Servers of both roles that write each piece of an answer when the router, which is in this
 * process, has read the one before. Ends with `vi.restoreAllMocks()`.
 */
export class CutInstances {
  /** Of all answers. */
  cut: Cut = UNCUT;
  /** Of the longest answer since it was set. */
  lengthBytes = 0;
  #writtenBytes = 0;
  #readBytes = 0;

  async start(): Promise<readonly [p: FakeUpstream, d: FakeUpstream]> {
    const { push } = BodyQueue.prototype;
    const read = (lengthBytes: number) => {
      this.#readBytes += lengthBytes;
    };
    vi.spyOn(BodyQueue.prototype, "push").mockImplementation(function (
      this: BodyQueue,
      chunk,
      sender,
    ) {
      read(chunk.length);
      push.call(this, chunk, sender);
    });
    return [await upstream(this.#answer), await upstream(this.#answer)];
  }

  readonly #answer: Answer = async ({ path, json, response }) => {
    const asked = json.kv_transfer_params as Fields | undefined;
    const endpoint = path as Endpoint;
    const { contentType, text } =
      asked?.do_remote_decode === true ? prefillAnswer(endpoint) : decodeAnswer(endpoint, json);
    const bytes = Buffer.from(text);
    this.lengthBytes = Math.max(this.lengthBytes, bytes.length);
    response.writeHead(200, { "content-type": contentType });
    response.flushHeaders();
    for (const piece of this.cut(bytes)) {
      response.write(piece);
      this.#writtenBytes += piece.length;
      while (this.#readBytes < this.#writtenBytes && !response.destroyed) await turn();
      await turn();
    }
    response.end();
  };
}
