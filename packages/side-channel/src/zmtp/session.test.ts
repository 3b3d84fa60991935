import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import { type ZmtpEvent, ZmtpSession, type ZmtpSessionOptions } from "./session.js";

const limits = { maxFrames: 4, maxMessageBytes: 1000 };
const router = (given: Partial<ZmtpSessionOptions> = {}) =>
  new ZmtpSession({ socketType: "ROUTER", peerTypes: ["REQ", "DEALER"], ...limits, ...given });
const req = (given: Partial<ZmtpSessionOptions> = {}) =>
  new ZmtpSession({ socketType: "REQ", peerTypes: ["ROUTER"], ...limits, ...given });
const bytes = (hex: string) => Uint8Array.from(Buffer.from(hex.replaceAll(" ", ""), "hex"));
const hex = (chunks: readonly Uint8Array[]) => Buffer.concat(chunks).toString("hex");

/** All events that the chunks cause. */
function events(session: ZmtpSession, ...chunks: Uint8Array[]): ZmtpEvent[] {
  const all: ZmtpEvent[] = [];
  for (const chunk of chunks) {
    session.push(chunk);
    for (let event = session.read(); event !== undefined; event = session.read()) all.push(event);
  }
  return all;
}

function failure(run: () => unknown): KvError {
  try {
    run();
  } catch (error) {
    if (KvError.is(error)) return error;
    throw error;
  }
  throw new Error("nothing was refused");
}

/** What a REQ of libzmq 4.3 sends before its first request. */
const GREETING = `ff00000000000000017f 03 01 4e554c4c${"00".repeat(48)}`;
const READY_OF_REQ =
  "04 26 05 5245414459 0b 536f636b65742d54797065 00000003 524551 08 4964656e74697479 00000000";
const opened = () => {
  const session = router();
  expect(events(session, bytes(GREETING), bytes(READY_OF_REQ)).at(-1)?.type).toBe("ready");
  return session;
};

describe("the handshake", () => {
  it("sends the bytes that libzmq sends, to a peer of ZMTP 3.0 or 3.1", () => {
    const session = router();
    expect(hex([session.greeting])).toBe(GREETING.replaceAll(" ", ""));
    const [send, ready] = events(session, bytes(GREETING), bytes(READY_OF_REQ));
    expect(send?.type === "send" && hex(send.chunks)).toBe(
      "04290552454144590b536f636b65742d5479706500000006524f55544552084964656e7469747900000000",
    );
    expect(ready).toEqual({ type: "ready", minor: 1 });
    const older = events(
      router(),
      bytes(GREETING.replace(" 03 01 ", " 03 00 ")),
      bytes(READY_OF_REQ),
    );
    expect(older[1]).toEqual({ type: "ready", minor: 0 });
  });

  it("gives the same events whatever chunks the bytes come in", () => {
    const message = "01 00 00 03 616263";
    const all = bytes(GREETING + READY_OF_REQ + message);
    const whole = events(router(), all);
    expect(whole.at(-1)).toEqual({ type: "message", frames: [bytes(""), bytes("616263")] });
    expect(events(router(), ...Array.from(all, (byte) => Uint8Array.of(byte)))).toEqual(whole);
    fc.assert(
      fc.property(fc.array(fc.integer({ min: 1, max: 40 })), (sizes) => {
        const chunks: Uint8Array[] = [];
        let at = 0;
        for (const size of sizes) {
          chunks.push(all.subarray(at, at + size));
          at += size;
        }
        chunks.push(all.subarray(at));
        expect(events(router(), ...chunks)).toEqual(whole);
      }),
    );
  });

  it.each([
    ["another protocol, at its first byte", "47", "first byte is 0x47"],
    ["no signature", "ff000000000000000100", "tenth byte"],
    ["ZMTP 2", "ff00000000000000017f 01", "version is 1"],
    ["a message before READY", `${GREETING} 00 01 61`, "before the handshake was complete"],
    ["another command", `${GREETING} 04 05 04 50494e47`, "the command PING, not READY"],
    ["a refusal", `${GREETING} 04 0a 05 4552524f52 03 626164`, "refused the connection: bad"],
    ["an empty command", `${GREETING} 04 00`, "no name"],
    ["a name that is too long", `${GREETING} 04 02 09 41`, "no name"],
    ["another socket type", GREETING + READY_OF_REQ.replace("524551", "505542"), 'socket is "PUB"'],
    ["no socket type", `${GREETING} 04 06 05 5245414459`, "no socket type"],
    ["metadata that ends early", `${GREETING} 04 09 05 5245414459 0b 5363`, "metadata ends"],
    [
      "a value that ends early",
      `${GREETING} 04 0c 05 5245414459 01 41 ffffffff`,
      "a value of the metadata",
    ],
    ["unknown flags", `${GREETING} 08`, "flags 0x8"],
    ["a command with MORE", `${GREETING} 05`, "flags 0x5"],
  ])("refuses %s", (_, sent, why) => {
    const error = failure(() => events(router(), bytes(sent)));
    expect(error.code).toBe("KV_WIRE_MALFORMED");
    expect(error.message).toContain(why);
  });

  it.each([
    ["another mechanism", "504c4149", '"PLAI", this side\'s is NULL'],
    ["an unknown mechanism name", "ffffffff", "mechanism"],
  ])("refuses %s as untrusted", (_, name, why) => {
    const error = failure(() => events(router(), bytes(GREETING.replace("4e554c4c", name))));
    expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(error.message).toContain(why);
  });

  it("refuses a long command when its header arrives", () => {
    const error = failure(() => events(router(), bytes(`${GREETING} 06 0000000000001001`)));
    expect(error.code).toBe("KV_WIRE_LIMIT_EXCEEDED");
    expect(error.message).toContain("a command of 4097 bytes");
  });
});

describe("messages", () => {
  it("encodes frames of every size as the other side decodes them", () => {
    const client = req({ maxFrames: 8, maxMessageBytes: 1e6 });
    const server = router({ maxFrames: 8, maxMessageBytes: 1e6 });
    const toServer = events(server, client.greeting);
    const toClient = events(client, server.greeting);
    for (const event of toServer) if (event.type === "send") events(client, ...event.chunks);
    for (const event of toClient) if (event.type === "send") events(server, ...event.chunks);
    for (const sizes of [[0], [255], [256], [0, 20_000, 3], [16_384, 16_385, 70_000]]) {
      const frames = sizes.map((size, at) => new Uint8Array(size).fill(at + 1));
      expect(
        events(server, ...client.encode(frames).map((chunk) => new Uint8Array(chunk))),
      ).toEqual([{ type: "message", frames }]);
    }
  });

  it("refuses frames without end, of any size, before their bodies arrive", () => {
    const four = "01 00 ".repeat(4);
    const error = failure(() => events(opened(), bytes(`${four} 01 00`)));
    expect(error.code).toBe("KV_WIRE_LIMIT_EXCEEDED");
    expect(error.message).toBe("ZMTP: a message of more than 4 frames; the limit is 4");
    const long = failure(() =>
      events(
        opened(),
        bytes("03 00000000000001f4"),
        new Uint8Array(500),
        bytes("02 00000000000001f5"),
      ),
    );
    expect(long.message).toBe("ZMTP: a message of at least 1001 bytes; the limit is 1000");
    const huge = failure(() => events(opened(), bytes("02 ffffffffffffffff")));
    expect(huge.code).toBe("KV_WIRE_LIMIT_EXCEEDED");
    expect(
      events(
        opened(),
        bytes("01 00 ".repeat(3)),
        bytes("02 00000000000003e8"),
        new Uint8Array(1000),
      ),
    ).toHaveLength(1);
  });

  it("tells whether a message has begun", () => {
    const session = opened();
    expect(session.partial).toBe(false);
    for (const part of ["01", "01", "61", "00", "01"]) {
      events(session, bytes(part));
      expect(session.partial).toBe(true);
    }
    events(session, bytes("62"));
    expect(session.partial).toBe(false);
  });

  it("answers PING, also between the frames of a message, ignores other commands, and refuses floods of them", () => {
    const session = opened();
    const ping = bytes("04 0a 04 50494e47 0064 787978");
    const [pong, message] = events(session, bytes("01 00"), ping, bytes("00 01 61"));
    expect(pong?.type === "send" && hex(pong.chunks)).toBe("040804504f4e47787978");
    expect(message?.type).toBe("message");
    expect(events(session, bytes("04 05 04 504f4e47"))).toEqual([]);
    const flood = failure(() =>
      events(session, Buffer.concat(Array.from({ length: 65 }, () => ping))),
    );
    expect(flood.code).toBe("KV_WIRE_LIMIT_EXCEEDED");
    expect(
      failure(() => events(opened(), bytes("04 0a 05 4552524f52 03 626164"))).message,
    ).toContain("bad");
  });

  it("any bytes are read or refused with a KvError", () => {
    fc.assert(
      fc.property(fc.uint8Array({ maxLength: 300 }), fc.boolean(), (noise, isOpen) => {
        const session = isOpen ? opened() : router();
        try {
          events(session, noise);
        } catch (error) {
          if (!KvError.is(error)) throw error;
        }
      }),
      { numRuns: 2000 },
    );
  });
});
