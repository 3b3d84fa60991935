import { createServer, type Server, type ServerResponse } from "node:http";
import type { AddressInfo, Socket } from "node:net";
import { systemClock } from "@kv/interface";
import { afterEach, expect, test, vi } from "vitest";
import { Deadline } from "../request/deadline.js";
import { Upstream } from "./upstream.js";

let instance: Instance | undefined;
let opened: Upstream | undefined;

afterEach(async () => {
  await opened?.close();
  instance?.close();
});

/** An HTTP server that answers when it has as many requests as `answerWhen` says. */
class Instance {
  /** The number of requests on each connection. */
  readonly requests = new Map<Socket, number>();
  answerWhen = 1;
  readonly #waiting: ServerResponse[] = [];
  readonly #server: Server = createServer((request, response) => {
    this.requests.set(request.socket, (this.requests.get(request.socket) ?? 0) + 1);
    this.#waiting.push(response);
    if (this.#waiting.length >= this.answerWhen)
      for (const each of this.#waiting.splice(0)) each.end("ok");
  });

  async listen(): Promise<string> {
    await new Promise<void>((resolve) => this.#server.listen(0, "127.0.0.1", resolve));
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  openConnections(): number {
    return [...this.requests.keys()].filter((socket) => !socket.destroyed).length;
  }

  closeConnections(): void {
    this.#server.closeAllConnections();
  }

  close(): void {
    this.#server.close();
    this.#server.closeAllConnections();
  }
}

async function setUp(onClosed?: (origin: string) => void) {
  const server = new Instance();
  instance = server;
  const origin = await server.listen();
  const upstream = new Upstream({ clock: systemClock(), connectMs: 5_000, onClosed });
  opened = upstream;
  const get = async (path = "/") => {
    const abort = new Deadline({ clock: systemClock() });
    const request = { role: "prefill", url: origin, method: "GET", path, headers: {} } as const;
    const answer = await upstream.send({ ...request, abort });
    await answer.body.readLimited(100);
    // undici takes the connection for idle one turn later.
    for (let turn = 0; turn < 2; turn += 1) await new Promise(setImmediate);
    return answer.status;
  };
  /** `count` requests at once, none of them answered before all have come. */
  const burst = async (count: number) => {
    server.answerWhen = count;
    const statuses = await Promise.all(Array.from({ length: count }, () => get()));
    server.answerWhen = 1;
    expect(statuses.every((status) => status === 200)).toBe(true);
  };
  return { server, origin, get, burst };
}

test("requests one after another take turns on the connections that a burst has opened", async () => {
  const { server, get, burst } = await setUp();
  await burst(4);
  for (let each = 0; each < 8; each += 1) await get();
  expect([...server.requests.values()]).toEqual([3, 3, 3, 3]);
});

test("a request that cannot be sent fails, and its connection serves the next one", async () => {
  const { server, get } = await setUp();
  await get();
  await expect(get("/a path")).rejects.toMatchObject({
    cause: { message: "invalid request path" },
  });
  await get();
  expect([...server.requests.values()]).toEqual([2]);
});

test("a connection that the instance closes is reported and used no more", async () => {
  const closed: string[] = [];
  const { server, origin, get } = await setUp((from) => closed.push(from));
  await get();
  server.closeConnections();
  await vi.waitFor(() => expect(closed).toEqual([origin]));
  await get();
  expect([...server.requests.values()]).toEqual([1, 1]);
});

test("at most 256 idle connections are kept", async () => {
  const { server, burst } = await setUp();
  await burst(260);
  await vi.waitFor(() => expect(server.openConnections()).toBe(256));
  await burst(256);
  expect(server.requests.size).toBe(260);
});

test("closing ends the requests that wait for an answer, and later ones fail", async () => {
  const { server, get } = await setUp();
  server.answerWhen = 2;
  const waiting = get();
  await vi.waitFor(() => expect(server.requests.size).toBe(1));
  const failed = expect(waiting).rejects.toThrow("UND_ERR_DESTROYED");
  await opened?.close();
  await failed;
  await expect(get()).rejects.toThrow("UND_ERR_DESTROYED");
  expect(server.requests.size).toBe(1);
});
