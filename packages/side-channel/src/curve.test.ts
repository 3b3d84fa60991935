import { type AddressInfo, connect, createServer } from "node:net";
import { manualClock } from "@kv/testing/manual-clock";
import { afterEach, describe, expect, test } from "vitest";
import {
  channel,
  closeAll,
  closers,
  closing,
  failure,
  host,
  OTHER,
  OWN,
  talker,
  until,
} from "../test/set-up.js";
import { curveClient, curveKeysOf } from "./zmtp/curve.js";

afterEach(closeAll);

/**
 * A TCP relay to a port of this host, with what it has seen. `change` may change the bytes on their
 * way.
 */
async function relayTo(
  port: number,
  change: (data: Buffer, direction: "request" | "reply") => void = () => {},
) {
  const [requests, replies]: [Buffer[], Buffer[]] = [[], []];
  const server = createServer((socket) => {
    const onward = connect(port, host);
    closers.push(
      () => void socket.destroy(),
      () => void onward.destroy(),
    );
    for (const [from, to, direction, seen] of [
      [socket, onward, "request", requests],
      [onward, socket, "reply", replies],
    ] as const) {
      from
        .on("error", () => {})
        .on("close", () => to.destroy())
        .on("data", (data) => {
          seen.push(Buffer.from(data));
          change(data, direction);
          to.write(data);
        });
    }
  });
  await new Promise<void>((resolve) => server.listen(0, host, resolve));
  closers.push(() => void server.close());
  return { port: (server.address() as AddressInfo).port, requests, replies };
}

describe("two of our side channels", () => {
  test("with the same key exchange messages, of which nobody between reads anything", async () => {
    const { port } = await talker([OWN]).echo();
    const relay = await relayTo(port);
    const { ask } = talker([OWN]);
    for (const word of ["secret one", "secret two"])
      expect(await ask(relay.port, word)).toEqual(["echo", word]);
    const wire = Buffer.concat([...relay.requests, ...relay.replies]).toString("latin1");
    expect(wire).toContain("MESSAGE");
    for (const word of ["secret", "echo", "ROUTER"]) expect(wire).not.toContain(word);
  });

  test.each(["request", "reply"] as const)(
    "a relay that changes one bit of a %s ends the connection",
    async (which) => {
      const { echo, asked } = talker([OWN]);
      const { port } = await echo();
      // Greetings and handshakes are shorter, or were sent before.
      const relay = await relayTo(port, (data, direction) => {
        if (direction === which && data.includes("MESSAGE"))
          data[data.length - 1] = (data.at(-1) ?? 0) ^ 1;
      });
      const error = await failure(talker([OWN]).ask(relay.port, "hello"));
      expect(error.code).toMatch(/UNTRUSTED|UNREACHABLE/);
      expect(asked).toEqual(which === "request" ? [] : ["hello"]);
    },
  );

  test("recorded bytes are refused when they are sent again, in whole or after a new greeting", async () => {
    const { echo, asked, warnings } = talker([OWN]);
    const { port } = await echo();
    const relay = await relayTo(port);
    await talker([OWN]).ask(relay.port, "hello");
    const recorded = Buffer.concat(relay.requests);
    expect(asked).toEqual(["hello"]);
    for (const sent of [[recorded], [recorded.subarray(0, 64), recorded.subarray(64)]]) {
      const socket = connect(port, host);
      for (const bytes of sent) socket.write(bytes);
      await closing(socket);
    }
    expect(asked).toEqual(["hello"]);
    expect(warnings[0]).toMatchObject({
      reason: "KV_HANDSHAKE_UNTRUSTED",
      error: expect.stringContaining("cookie"),
    });
  });

  test("with different keys: both sides' errors name the setting", async () => {
    const { echo, warnings } = talker([OTHER]);
    const { port } = await echo();
    const error = await failure(talker([OWN]).ask(port, "hello"));
    expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(error.message).toContain("ended the CURVE handshake");
    expect(error.hint).toContain(
      "handshake_key_file in kv_connector_extra_config of an engine, --handshake-key-file",
    );
    expect(warnings).toMatchObject([
      { reason: "KV_HANDSHAKE_UNTRUSTED", hint: expect.stringContaining("handshake_key_file") },
    ]);
    expect(JSON.stringify(warnings)).not.toContain("another key than");
  });

  test.each([
    ["a request without CURVE to a listener with it", undefined, [OWN]],
    ["a request with CURVE to a listener without it", [OWN], undefined],
  ])(
    "%s is refused: both sides' errors name both mechanisms and the setting",
    async (_, asks, answers) => {
      const { echo, warnings } = talker(answers);
      const { port } = await echo();
      const error = await failure(talker(asks).ask(port, "hello"));
      expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
      await until(() => warnings.length > 0);
      for (const found of [error.message, String(warnings[0]?.["error"])])
        expect(found).toMatch(/NULL.*CURVE|CURVE.*NULL/);
      for (const found of [error.hint, warnings[0]?.["hint"]])
        expect(found).toContain("handshake_key_file");
    },
  );

  test("a connection without CURVE that was kept is not used by a request with it", async () => {
    const { side, ask } = talker();
    const { port } = await talker().echo();
    await ask(port, "hello");
    const asked = { host, port, frames: [OWN], timeoutMs: 20_000 };
    const error = await failure(Promise.resolve(side.withEncryption?.(() => [OWN]).request(asked)));
    expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    await ask(port, "hello");
  });

  test("the key changes on one side after the other, also for kept connections", async () => {
    let keys = { answers: [OWN], asks: [OWN] };
    const made = channel();
    const listening = made.withEncryption?.(() => keys.answers);
    const asking = made.withEncryption?.(() => keys.asks);
    const listener = await listening?.listen({ host, port: 0, answer: (frames) => frames });
    const ask = async () =>
      asking?.request({ host, port: listener?.port ?? 0, frames: [OWN], timeoutMs: 20_000 });
    const both = [OWN, OTHER];
    for (const given of [
      keys,
      { answers: both, asks: [OWN] },
      { answers: both, asks: [OTHER, OWN] },
      { answers: [OTHER], asks: [OTHER, OWN] },
      { answers: [OTHER], asks: [OTHER] },
    ]) {
      keys = given;
      expect((await ask())?.frames).toHaveLength(1);
    }
    keys.asks = [OWN];
    expect((await failure(ask())).code).toBe("KV_HANDSHAKE_UNTRUSTED");
  });

  test("a kept connection ends when its key is removed from the listener", async () => {
    let answers = [OWN, OTHER];
    const made = channel();
    const listener = await made
      .withEncryption?.(() => answers)
      .listen({ host, port: 0, answer: (frames) => frames });
    const { ask } = talker([OWN]);
    const port = listener?.port ?? 0;
    expect(await ask(port, "one")).toEqual(["one"]);
    answers = [OTHER];
    expect((await failure(ask(port, "two"))).message).toContain("CURVE");
  });
});

describe("before the key is proved, the limits hold", () => {
  const GREETING = Buffer.from(`ff00000000000000017f03014355525645${"00".repeat(47)}`, "hex");

  test.each([
    ["a HELLO of 201 bytes, at its header", [4, 201], "KV_WIRE_LIMIT_EXCEEDED"],
    ["a HELLO of 2^40 bytes, at its header", [6, 0, 0, 1, 0, 0, 0, 0, 0], "KV_WIRE_LIMIT_EXCEEDED"],
    [
      "a HELLO of noise",
      [4, 200, 5, 72, 69, 76, 76, 79, 1, ...Array<number>(193).fill(7)],
      "KV_WIRE_MALFORMED",
    ],
    ["a message", [0, 1, 97], "KV_WIRE_MALFORMED"],
  ])("%s ends the connection, and others are served", async (_, bytes, reason) => {
    const { echo, warnings } = talker([OWN]);
    const { port } = await echo();
    const socket = connect(port, host);
    socket.write(Buffer.concat([GREETING, Buffer.from(bytes)]));
    await closing(socket);
    expect(warnings).toMatchObject([{ reason }]);
    expect(await talker([OWN]).ask(port, "hello")).toEqual(["echo", "hello"]);
  });

  test("a handshake that stops after WELCOME ends after greetingTimeoutMs, and a larger request ends its connection", async () => {
    const clock = manualClock();
    const { echo } = talker([OWN], { clock, maxRequestBytes: 1000, greetingTimeoutMs: 1000 });
    const { port } = await echo();
    const socket = connect(port, host);
    let closed = false;
    socket
      .on("error", () => {})
      .on("close", () => {
        closed = true;
      });
    let received = 0;
    socket.on("data", (data) => {
      received += data.length;
    });
    const [hello = new Uint8Array(0)] = curveClient({
      socketType: "REQ",
      keys: () => [curveKeysOf(OWN)],
    }).open();
    socket.write(Buffer.concat([GREETING, Uint8Array.of(4, 200), hello]));
    await until(() => received === 64 + 2 + 168);
    clock.advance(1250);
    await until(() => closed);
    const { ask } = talker([OWN]);
    expect(await ask(port, "x".repeat(1000))).toHaveLength(2);
    expect((await failure(ask(port, "x".repeat(1001)))).message).toContain("closed the connection");
  });
});
