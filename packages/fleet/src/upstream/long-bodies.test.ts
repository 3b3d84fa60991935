import { createServer } from "node:http";
import { type AddressInfo, Socket } from "node:net";
import { buffer } from "node:stream/consumers";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, expect, test, vi } from "vitest";
import { Deadline } from "../request/deadline.js";
import { Upstream } from "./upstream.js";

afterEach(() => void vi.restoreAllMocks());

test("long bodies leave in pieces of 64 KiB, each in a turn of the event loop of its own, and arrive as they are", async () => {
  const received: Buffer[] = [];
  const server = createServer(async (request, response) => {
    received.push(await buffer(request));
    response.end();
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  await using upstream = new Upstream({ connectMs: 5_000, clock: manualClock() });
  let turn = 0;
  let isCounting = true;
  const count = () => {
    turn += 1;
    if (isCounting) setImmediate(count);
  };
  setImmediate(count);
  const turns: number[] = [];
  const write = Socket.prototype.write;
  vi.spyOn(Socket.prototype, "write").mockImplementation(function (
    this: Socket,
    ...args: unknown[]
  ) {
    const [chunk] = args;
    if (chunk instanceof Uint8Array && chunk.byteLength > 1024) {
      expect(chunk.byteLength).toBeLessThanOrEqual(64 * 1024);
      turns.push(turn);
    }
    return Reflect.apply(write, this, args) as boolean;
  });
  const bodies = ["x", "y"].map((letter) =>
    ["{", letter.repeat(1_000_000), "}"].map((piece) => Buffer.from(piece)),
  );
  await Promise.all(
    bodies.map(async (body) => {
      const abort = new Deadline({ clock: manualClock() });
      const sent = {
        role: "prefill",
        url,
        method: "POST",
        path: "/",
        headers: {},
        body,
        abort,
      } as const;
      expect((await upstream.send(sent)).status).toBe(200);
    }),
  );
  isCounting = false;
  server.close();
  server.closeAllConnections();
  expect(turns).toHaveLength(2 * Math.ceil(1_000_000 / 65_536));
  expect(new Set(turns).size).toBe(turns.length);
  const arrived = received.map((body) => body.toString()).sort();
  expect(arrived).toEqual(bodies.map((body) => Buffer.concat(body).toString()));
});
