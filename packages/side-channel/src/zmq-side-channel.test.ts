import { randomBytes } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect, createServer, type Server, type Socket } from "node:net";
import { type LogFields, type SideChannel, silentLog } from "@kv/interface";
import { afterEach, expect, test } from "vitest";
import { Dealer, Router } from "zeromq";
import {
  channel,
  closeAll,
  closers,
  closing,
  failure,
  host,
  listen,
  until,
} from "../test/set-up.js";

afterEach(closeAll);

const text = (frame: Uint8Array | undefined) => Buffer.from(frame ?? []).toString();
const hello = { host, frames: [Buffer.from("hello")], timeoutMs: 20_000 };
const silent = (side: SideChannel) => listen(side, () => undefined);

async function tcpServer(onConnection: (socket: Socket) => void): Promise<number> {
  const sockets: Socket[] = [];
  const server: Server = createServer((socket) => {
    sockets.push(socket.on("error", () => {}));
    onConnection(socket);
  });
  await new Promise<void>((resolve) => server.listen(0, host, resolve));
  closers.push(() => {
    for (const socket of sockets) socket.destroy();
    return new Promise((resolve) => server.close(resolve));
  });
  return (server.address() as { port: number }).port;
}

test("a request gets its reply, and the times at which it was sent and answered", async () => {
  const side = channel();
  const listener = await listen(side, ([frame]) => [
    Buffer.from(`${text(frame)} there`),
    Buffer.from("2"),
  ]);
  const reply = await side.request({ ...hello, port: listener.port });
  expect(reply.frames.map(text)).toEqual(["hello there", "2"]);
  expect(reply.receivedAtMs).toBeGreaterThanOrEqual(reply.sentAtMs);
});

/** An echo listener that counts its connections. */
async function countingRouter(port: number | "*" = "*") {
  const router = new Router({ linger: 0 });
  const seen = { accepted: 0, ended: 0 };
  router.events.on("accept", () => {
    seen.accepted += 1;
  });
  router.events.on("disconnect", () => {
    seen.ended += 1;
  });
  await router.bind(`tcp://${host}:${port}`);
  void (async () => {
    for await (const frames of router) await router.send(frames);
  })().catch(() => {});
  closers.push(() => router.close());
  return {
    seen,
    port: Number(router.lastEndpoint?.split(":").at(-1)),
    close: () => router.close(),
  };
}

test("sequential requests reuse one connection, which closes after an idle time", async () => {
  const timers = new Map<object, () => void>();
  const side = channel({
    clock: {
      now: () => performance.now(),
      setTimer(done) {
        const timer = { cancel: () => void timers.delete(timer) };
        timers.set(timer, done);
        return timer;
      },
    },
  });
  const { seen, port } = await countingRouter();
  for (const word of ["one", "two", "three"]) {
    const { frames } = await side.request({ ...hello, port, frames: [Buffer.from(word)] });
    expect(frames.map(text)).toEqual([word]);
  }
  await Promise.all([side.request({ ...hello, port }), side.request({ ...hello, port })]);
  expect(seen).toEqual({ accepted: 2, ended: 0 });
  expect(timers.size).toBe(2);
  for (const strike of [...timers.values()]) strike();
  expect(timers.size).toBe(0);
  await until(() => seen.ended === 2);
  await side.request({ ...hello, port });
  expect(seen.accepted).toBe(3);
});

test("keeps at most four idle connections", async () => {
  const side = channel();
  const { seen, port } = await countingRouter();
  await Promise.all(Array.from({ length: 20 }, () => side.request({ ...hello, port })));
  expect(seen.accepted).toBe(20);
  await until(() => seen.ended === 16);
  await side.close();
  await until(() => seen.ended === 20);
});

test("reaches a restarted peer although a connection to the previous process was kept", async () => {
  const side = channel();
  const first = await countingRouter();
  await side.request({ ...hello, port: first.port });
  first.close();
  let second: Awaited<ReturnType<typeof countingRouter>> | undefined;
  while (second === undefined) second = await countingRouter(first.port).catch(() => undefined);
  const { frames } = await side.request({ ...hello, port: first.port });
  expect(frames.map(text)).toEqual(["hello"]);
});

test("resolves host names when it listens and when it sends a request", async () => {
  const side = channel();
  const listener = await side.listen({
    host: "localhost",
    port: 0,
    answer: () => [Buffer.from("here")],
  });
  expect(listener.host).toBe("localhost");
  expect(
    text((await side.request({ ...hello, host: "localhost", port: listener.port })).frames[0]),
  ).toBe("here");
});

test("`await using` closes a listener and a side channel", async () => {
  const own = channel();
  let port: number;
  {
    await using listener = (await silent(own)) as Awaited<ReturnType<typeof silent>> &
      AsyncDisposable;
    ({ port } = listener);
  }
  expect(await failure(own.request({ ...hello, port }))).toMatchObject({
    code: "KV_SIDE_CHANNEL_UNREACHABLE",
  });
  await own[Symbol.asyncDispose]();
  expect(await failure(silent(own))).toMatchObject({ code: "KV_SIDE_CHANNEL_CLOSED" });
});

test("many requests at once each get their own reply", async () => {
  const side = channel();
  const { port } = await listen(side, async (frames) => frames);
  const numbers = Array.from({ length: 200 }, (_, i) => `${i}`);
  const replies = await Promise.all(
    numbers.map((number) => side.request({ ...hello, port, frames: [Buffer.from(number)] })),
  );
  expect(replies.map(({ frames }) => text(frames[0]))).toEqual(numbers);
});

test("listening on a port in use fails, and the error names the address and the variable to change", async () => {
  const side = channel();
  const { port } = await silent(side);
  const error = await failure(side.listen({ host, port, answer: () => undefined }));
  expect(error.code).toBe("KV_SIDE_CHANNEL_BIND_FAILED");
  expect(error.message).toContain(`${host}:${port}`);
  expect(error.hint).toContain("VLLM_NIXL_SIDE_CHANNEL_PORT");
});

test.each(["no-such-host.invalid", "192.0.2.1", "a;b"])("%s cannot be bound", async (elsewhere) => {
  const error = await failure(
    channel().listen({ host: elsewhere, port: 0, answer: () => undefined }),
  );
  expect(error.code).toBe("KV_SIDE_CHANNEL_BIND_FAILED");
  expect(error.hint).toContain("VLLM_NIXL_SIDE_CHANNEL_HOST");
});

// These requests time out after 20 s, and the tests after 10 s: a test fails if an error appears
// only at the request's deadline.
test.each<[string, (side: SideChannel) => Promise<{ host?: string; port: number }>, string]>([
  [
    "a port without a listener",
    async (side) => {
      const { port, close } = await silent(side);
      await close();
      return { port };
    },
    "refused",
  ],
  ["an unknown host name", async () => ({ host: "no-such-host.invalid", port: 1 }), "not found"],
  [
    "a server that does not speak ZMQ",
    async () => ({
      port: await tcpServer((socket) => socket.end("HTTP/1.1 400 Bad Request\r\n\r\n")),
    }),
    "does not speak ZMQ",
  ],
  [
    "a peer that dies after receiving it",
    async () => {
      const router = new Router({ linger: 0 });
      await router.bind(`tcp://${host}:*`);
      void router.receive().then(() => router.close());
      return { port: Number(router.lastEndpoint?.split(":").at(-1)) };
    },
    "closed the connection",
  ],
])(
  "a request to %s fails at once, and the error says so",
  { timeout: 10_000 },
  async (_, at, why) => {
    const side = channel();
    const error = await failure(side.request({ ...hello, ...(await at(side)) }));
    expect(error.code).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
    expect(error.message).toContain(why);
  },
);

test("refuses a reply larger than the limit", { timeout: 10_000 }, async () => {
  const side = channel({ maxReplyBytes: 1000 });
  const { port } = await listen(side, ([frame]) => [new Uint8Array(frame?.length ?? 0)]);
  await side.request({ ...hello, port, frames: [new Uint8Array(1000)] });
  const error = await failure(side.request({ ...hello, port, frames: [new Uint8Array(1001)] }));
  expect(error.code).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  expect(error.message).toContain("larger than 1000 bytes");
});

test("a ZMQ listener that does not answer causes a timeout; a silent TCP server counts as unreachable", async () => {
  const side = channel();
  const { port } = await silent(side);
  const error = await failure(side.request({ ...hello, port, timeoutMs: 50 }));
  expect(error.code).toBe("KV_SIDE_CHANNEL_TIMEOUT");
  expect(error.message).toContain("50 ms");
  const mute = await tcpServer(() => {});
  const unreachable = await failure(side.request({ ...hello, port: mute, timeoutMs: 50 }));
  expect(unreachable.code).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
});

test("an aborted request throws the signal's reason, even if it was aborted before it started", {
  timeout: 10_000,
}, async () => {
  const side = channel();
  const { port } = await silent(side);
  const abort = new AbortController();
  const reason = new Error("no longer wanted");
  const waiting = failure(side.request({ ...hello, port, signal: abort.signal }));
  abort.abort(reason);
  expect(await waiting).toBe(reason);
  expect(await failure(side.request({ ...hello, port, signal: abort.signal }))).toBe(reason);
});

test("the listener keeps serving after malformed input and after exceptions from `answer`", async () => {
  const warnings: (LogFields | undefined)[] = [];
  const side = channel({ log: { ...silentLog, warn: (_, fields) => warnings.push(fields) } });
  let refused = 0;
  let largest = 0;
  const listener = await listen(side, (frames) => {
    largest = Math.max(largest, ...frames.map(({ byteLength }) => byteLength));
    if (frames.length === 1 && text(frames[0]) === "hello") return [Buffer.from("still here")];
    refused += 1;
    throw refused % 2 === 0 ? new Error("what is this") : "not even an error";
  });
  const dealer = new Dealer({ linger: 0, sendHighWaterMark: 100_000 });
  closers.push(() => dealer.close());
  dealer.connect(`tcp://${host}:${listener.port}`);
  for (let i = 0; i < 3000; i += 1) {
    const parts = Array.from({ length: i % 17 }, (_, part) => randomBytes((i * 7 + part) % 300));
    await dealer.send(parts.length === 0 ? [Buffer.alloc(0)] : parts);
  }
  // This exceeds the size limit of requests, so the listener closes the connection.
  const disconnected = new Promise<void>((resolve) =>
    dealer.events.on("disconnect", () => resolve()),
  );
  await dealer.send([Buffer.alloc(0), Buffer.alloc(100_000)]);
  await disconnected;
  // These bytes are not ZMTP.
  for (const bytes of [
    randomBytes(1000),
    Buffer.from("GET / HTTP/1.1\r\n\r\n"),
    Buffer.from("ff00000000000000017f03", "hex"),
    Buffer.alloc(0),
  ]) {
    const socket = connect(listener.port, host, () => socket.end(bytes));
    await closing(socket);
  }
  expect(text((await side.request({ ...hello, port: listener.port })).frames[0])).toBe(
    "still here",
  );
  await until(() => refused > 2000);
  expect(largest).toBeLessThan(4096);
  // The listener logs at most one warning per second, and counts the rest.
  expect(warnings.length).toBeLessThan(60);
});

test("handles at most maxPending requests at once, and closes although `answer` never resolves", async () => {
  const side = channel({ maxPending: 3 });
  let asked = 0;
  const listener = await listen(side, () => {
    asked += 1;
    return new Promise(() => {});
  });
  const waiting = Array.from({ length: 10 }, () =>
    failure(side.request({ ...hello, port: listener.port })),
  );
  await until(() => asked === 3);
  await listener.close();
  for (const error of await Promise.all(waiting))
    expect(error.code).toBe("KV_SIDE_CHANNEL_UNREACHABLE");
  expect(asked).toBe(3);
});

test("close fails the requests in flight and refuses new ones", { timeout: 10_000 }, async () => {
  const side = channel();
  const { port } = await silent(side);
  const waiting = failure(side.request({ ...hello, port }));
  await new Promise((resolve) => setImmediate(resolve));
  await side.close();
  expect((await waiting).code).toBe("KV_SIDE_CHANNEL_CLOSED");
  expect((await failure(side.request({ ...hello, port }))).code).toBe("KV_SIDE_CHANNEL_CLOSED");
  expect((await failure(silent(side))).code).toBe("KV_SIDE_CHANNEL_CLOSED");
});

test("a listener's port is free after close, which may be called more than once", async () => {
  const side = channel();
  const first = await silent(side);
  await Promise.all([first.close(), first.close()]);
  await first.close();
  const second = await side.listen({
    host,
    port: first.port,
    answer: () => [Buffer.from("second")],
  });
  expect(text((await side.request({ ...hello, port: second.port })).frames[0])).toBe("second");
});

test("answers the ZMTP bytes recorded from a vLLM client", async () => {
  const recorded = readFileSync(
    new URL("../../protocol/fixtures/wire/handshake/pull_tp1_prefill.zmtp.jsonl", import.meta.url),
    "utf8",
  )
    .split("\n")
    .filter(Boolean)
    .map((line) => JSON.parse(line) as { dir: string; hex: string });
  const fixture = (name: string) =>
    readFileSync(
      new URL(
        `../../protocol/fixtures/wire/handshake/pull_tp1_prefill.pp0tp0.${name}.bin`,
        import.meta.url,
      ),
    );
  const asked: string[] = [];
  const listener = await listen(channel(), ([frame]) => {
    asked.push(Buffer.from(frame ?? []).toString("hex"));
    return [fixture("rep0"), fixture("rep1")];
  });
  let received = Buffer.alloc(0);
  const socket = connect(listener.port, host);
  closers.push(() => socket.destroy());
  socket.on("data", (data) => {
    received = Buffer.concat([received, data]);
  });
  // Replays the recorded order: ZMQ closes a connection that sends a message before the greeting is
  // complete.
  let wanted = Buffer.alloc(0);
  for (const { dir, hex } of recorded) {
    const bytes = Buffer.from(hex, "hex");
    if (dir === "s2c") wanted = Buffer.concat([wanted, bytes]);
    else {
      await until(() => received.length >= wanted.length);
      socket.write(bytes);
    }
  }
  await until(() => received.length >= wanted.length);
  expect(asked).toEqual([fixture("req").toString("hex")]);
  expect(received.toString("hex")).toBe(wanted.toString("hex"));
});

test("a listener closes while requests arrive, and its port is free afterwards", async () => {
  const side = channel();
  for (let round = 0; round < 20; round += 1) {
    let answered = 0;
    const { port, close } = await listen(side, () => {
      answered += 1;
      return [Buffer.from("x")];
    });
    const dealer = new Dealer({ linger: 0 });
    dealer.connect(`tcp://${host}:${port}`);
    let pouring = true;
    const poured = (async () => {
      while (pouring) {
        await dealer.send([Buffer.alloc(0), Buffer.from("hello")]);
        await new Promise((resolve) => setImmediate(resolve));
      }
    })();
    await until(() => answered > 20);
    await close();
    const refused = await new Promise((resolve) => {
      const socket = connect(port, host, () => {
        socket.destroy();
        resolve(false);
      });
      socket.on("error", () => resolve(true));
    });
    expect(refused, `round ${round}`).toBe(true);
    pouring = false;
    await poured;
    dealer.close();
  }
});
