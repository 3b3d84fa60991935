import type { ServerResponse } from "node:http";
import { setTimeout as sleep } from "node:timers/promises";
import type { InstanceSpecInput } from "@kv/fleet";
import type { KvTransferParams } from "@kv/interface";
import {
  COMPLETION,
  type FakeUpstream,
  type Seen,
  sendJson,
  startUpstream,
} from "@kv/testing/http/fake-upstream";
import { memoryNetwork } from "@kv/transport-memory";
import { isRelease } from "../support/releases.js";
import { type Case, othersOf } from "./cases.js";
import { type ServedEngine, startServedEngine } from "./served-engine.js";
import { until } from "./until.js";

/** More than sockets hold, for a client that does not read. */
const LONG_TEXTS = Array.from({ length: 160 }, () => "long ".repeat(12 * 1024));

/** The instances of a case: real engines behind HTTP servers that play the fault. */
export class FaultyPair {
  readonly #case: Case;
  readonly #isPush: boolean;
  readonly #faulty: ReadonlySet<string>;
  readonly #network = memoryNetwork();
  readonly #engines: ServedEngine[] = [];
  readonly #instances: FakeUpstream[] = [];
  /** What engines have seen that must not be: wrong bytes, writes to blocks of others. */
  readonly violations: string[] = [];
  /** Legs with KV whose answer nobody has read: the connection was closed before. */
  cutLegs = 0;

  constructor(one: Case, faulty: readonly ("P" | "D")[]) {
    this.#case = one;
    this.#isPush = one.strategy.startsWith("push") || one.strategy === "auto";
    this.#faulty = new Set(faulty);
  }

  /** What engines hold, by name. */
  held(): string[] {
    return this.#engines.flatMap((engine) =>
      Object.entries(engine.outstanding())
        .filter(([, count]) => count !== 0)
        .map(([name, count]) => `${count} ${name} of ${engine.kv.engineId}`),
    );
  }

  /** Blocks that nobody has freed. */
  leasesEnded(): number {
    return this.#engines.reduce((sum, engine) => sum + engine.leasesEnded(), 0);
  }

  /** Requests that instances have not answered, and whose connections are open. */
  get open(): number {
    return this.#instances
      .flatMap(({ seen }) => seen)
      .filter(({ response }) => !response.writableFinished && !response.destroyed).length;
  }

  /** A role's instances, the faulty one first. */
  async start(leg: "P" | "D"): Promise<Exclude<InstanceSpecInput, string>[]> {
    const answer = leg === "P" ? this.#prefill : this.#decode;
    return Promise.all(
      Array.from({ length: 1 + othersOf(this.#case, leg) }, async (_, at) => {
        const engine = await startServedEngine({
          network: this.#network,
          hostName: `${leg}${at}`,
          isPush: this.#isPush,
          violation: (what) => void this.violations.push(what),
        });
        const isFaulty = at === 0 && this.#faulty.has(leg);
        const instance = await startUpstream((seen) => answer(seen, engine, isFaulty));
        this.#engines.push(engine);
        this.#instances.push(instance);
        return { url: instance.url, kv: engine.kv };
      }),
    );
  }

  /** Resolves when a P, or a D, has a request. */
  async reached(leg: "P" | "D"): Promise<void> {
    const isDecode = (at: number) => at > othersOf(this.#case, "P");
    const of = this.#instances.filter((_, at) => isDecode(at) === (leg === "D"));
    await Promise.race(of.map((instance) => instance.request(0)));
  }

  /** Returns what the transport still holds. */
  async close(): Promise<string[]> {
    await Promise.all(this.#instances.map((instance) => instance.close()));
    await Promise.all(this.#engines.map((engine) => engine.close()));
    const left = () =>
      Object.entries(this.#network.outstanding())
        .filter(([, count]) => count !== 0)
        .map(([name, count]) => `${count} ${name}`);
    await until(() => left().length === 0);
    return left();
  }

  readonly #prefill = async (
    seen: Seen,
    engine: ServedEngine,
    isFaulty: boolean,
  ): Promise<void> => {
    if (isFaulty) return play(this.#case, seen);
    const { response, headers, path, json } = seen;
    if (path.endsWith("/render")) return sendJson(response, {}, 404);
    const params = json.kv_transfer_params as KvTransferParams;
    const { answer, abort } = engine.prefill(String(headers["x-request-id"]), params);
    response.once("close", abort);
    const kv = await answer.catch(() => undefined);
    if (kv === undefined) return;
    if (!response.destroyed) sendJson(response, { ...COMPLETION, kv_transfer_params: kv });
    await this.#noteCut(seen);
  };

  /** A connection whose answer was read is kept. */
  async #noteCut({ response: { req } }: Seen): Promise<void> {
    const { socket } = req;
    await sleep(CUT_MS);
    if (socket.destroyed) this.cutLegs += 1;
  }

  readonly #decode = async (seen: Seen, engine: ServedEngine, isFaulty: boolean): Promise<void> => {
    const { response, headers, json } = seen;
    const isTaken = !isRelease(seen) && (!isFaulty || TAKES.test(this.#case.fault));
    const params = json.kv_transfer_params as KvTransferParams | undefined;
    let received: Promise<unknown> | undefined;
    if (params !== undefined && (isTaken || isRelease(seen))) {
      const { answer, abort } = engine.decode(String(headers["x-request-id"]), params);
      received = answer;
      answer.catch(() => {});
      // A server that refuses a request has its engine tell P.
      if (isTaken) response.once("close", abort);
      else abort();
    }
    if (isRelease(seen)) return sendJson(response, { error: { message: "beam search" } }, 400);
    if (isFaulty) {
      play(this.#case, seen);
      // Another copy's end may close the connection of a leg that D refuses: it may have been taken.
      if (params !== undefined && !isTaken && this.#case.n > 1) await this.#noteCut(seen);
      return;
    }
    await sleep(5);
    try {
      await received;
    } catch (error) {
      if (!response.destroyed) sendJson(response, { error: { message: String(error) } }, 500);
      return;
    }
    if (!response.destroyed) respond(this.#case, seen);
  };
}

/** Longer than a proxy needs to close a connection, and shorter than one is kept. */
const CUT_MS = 1000;

/** Faults of a D whose engine has taken the request. */
const TAKES = /^(200 error|500|half|reset.*|silence)$/;

function respond({ client }: Case, { response, json, path }: Seen): void {
  const texts = client === "does not read" ? LONG_TEXTS : ["hello"];
  if (path === "/v1/embeddings") sendJson(response, { data: texts });
  else if (json.stream === true) {
    response.writeHead(200, { "content-type": "text/event-stream" });
    for (let index = 0; index < Number(json.n ?? 1); index += 1)
      for (const text of texts)
        response.write(
          `data: ${JSON.stringify({ ...COMPLETION, choices: [{ index, text }] })}\n\n`,
        );
    response.end("data: [DONE]\n\n");
  } else {
    const indices = Array.from({ length: Number(json.n ?? 1) }, (_, index) => index);
    const choices = indices.map((index) => ({ index, text: texts.join("") }));
    sendJson(response, { ...COMPLETION, choices });
  }
}

const ERROR = { error: { message: "no", type: "InternalServerError", param: null, code: 500 } };

/** Does what the fault says in place of the instance's part. */
function play({ fault }: Case, { response, json }: Seen): void {
  const stream = json.stream === true;
  const type = stream ? "text/event-stream" : "application/json";
  const faults: Readonly<Record<string, () => void>> = {
    "200 error": () =>
      stream
        ? void response
            .writeHead(200, { "content-type": type })
            .end(`data: ${JSON.stringify(ERROR)}\n\ndata: [DONE]\n\n`)
        : sendJson(response, ERROR),
    HTML: () => void response.writeHead(200, { "content-type": "text/html" }).end("<html></html>"),
    half: () => half(response, type),
    reset: () => void response.destroy(),
    "reset after the head": () => {
      response.writeHead(200, { "content-type": type });
      response.flushHeaders();
      setTimeout(() => response.destroy(), 5);
    },
    silence: () => {},
  };
  const known = faults[fault];
  if (known !== undefined) known();
  else if (fault === "204") response.writeHead(204).end();
  else sendJson(response, ERROR, Number(fault));
}

function half(response: ServerResponse, type: string): void {
  response.writeHead(200, { "content-type": type, "content-length": 10_000 });
  response.write(`data: ${JSON.stringify(COMPLETION)}\n\n`);
  setTimeout(() => response.destroy(), 20);
}
