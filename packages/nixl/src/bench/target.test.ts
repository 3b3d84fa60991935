import { once } from "node:events";
import { connect, type Socket } from "node:net";
import { afterEach, describe, expect, test } from "vitest";
import { type BenchTarget, listenAsTarget, type TargetLimits } from "./target.js";

let target: BenchTarget | undefined;
const sockets: Socket[] = [];
afterEach(async () => {
  for (const socket of sockets.splice(0)) socket.destroy();
  await target?.close();
  target = undefined;
});

async function listen(limits: Partial<TargetLimits> = {}): Promise<void> {
  target = await listenAsTarget({ host: "127.0.0.1", port: 0, maxBytes: 1 << 20, limits });
}

/** A connection, and what the target sends on it until it closes it. */
async function open() {
  const socket = connect(target?.port ?? 0, "127.0.0.1");
  sockets.push(socket);
  let text = "";
  socket.on("error", () => {});
  socket.on("data", (chunk) => {
    text += String(chunk);
  });
  const closed = new Promise<string>((resolve) => socket.once("close", () => resolve(text)));
  await once(socket, "connect");
  return {
    socket,
    closed,
    async ask(line: string): Promise<string> {
      socket.write(`${line}\n`);
      while (!text.endsWith("\n")) await once(socket, "data");
      const answer = text;
      text = "";
      return answer;
    },
  };
}

/** A request that is answered without memory. */
const FILL = '{"do":"fill"}';

/** One try for each limit: the offender's connection ends, and the next session begins. */
const tries: { readonly [K in keyof TargetLimits]: () => Promise<void> } = {
  async maxLineBytes() {
    await listen();
    const long = await open();
    long.socket.write("x".repeat(5000));
    expect(await long.closed).toBe("");
  },
  async maxUnreadBytes() {
    await listen();
    const deaf = await open();
    deaf.socket.pause();
    // Each request of 14 bytes has an answer of 80. The sockets' buffers take the first MBs of
    // them.
    const write = () => {
      while (!deaf.socket.destroyed && deaf.socket.write(`${FILL}\n`.repeat(1000)));
    };
    deaf.socket.on("drain", write);
    write();
    await deaf.closed;
  },
  async firstRequestMs() {
    await listen({ firstRequestMs: 100 });
    const slow = await open();
    const drip = setInterval(() => slow.socket.write("x"), 20);
    expect(await slow.closed).toBe("");
    clearInterval(drip);
  },
  async idleMs() {
    await listen({ idleMs: 100 });
    const idle = await open();
    await idle.ask(FILL);
    expect(await idle.closed).toBe("");
  },
};

/** Begins a session, once the one before has ended. */
const expectNextSession = () =>
  expect.poll(async () => (await (await open()).ask(FILL)).includes("begins with open")).toBe(true);

describe("limits of a target of benchmarks", () => {
  test.each(Object.entries(tries))(
    "%s: the offender is disconnected, and the next one is served",
    async (_, attempt) => {
      await attempt();
      await expectNextSession();
    },
  );

  test("a second session is refused while one goes on", async () => {
    await listen();
    const first = await open();
    expect(await (await open()).closed).toContain("another benchmark uses this target");
    expect(await first.ask(FILL)).toContain("begins with open");
    first.socket.destroy();
    await expectNextSession();
  });

  test("A6: requests for more memory than the limit are refused, after a failed one too", async () => {
    await listen();
    const session = await open();
    const ask = (lengthBytes: number, backend = "NONE") =>
      session.ask(JSON.stringify({ do: "open", lengthBytes, backend }));
    // The agent cannot be created, so the session may ask again.
    expect(await ask(1 << 19)).toContain("error");
    for (let time = 0; time < 4; time++)
      expect(await ask((1 << 20) + 1)).toContain("allocates 1048576 at most");
  });

  test("malformed requests are answered, and the next session is served", async () => {
    await listen();
    const first = await open();
    expect(await first.ask('{"do":"digest","lengthBytes":-1}')).toContain("KV_WIRE_MALFORMED");
    first.socket.write(`${"[".repeat(4000)}\n`);
    expect(await first.closed).toBe("");
    await expectNextSession();
  });
});
