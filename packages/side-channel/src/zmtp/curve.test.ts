import { readFileSync } from "node:fs";
import { KvError } from "@kv/interface";
import fc from "fast-check";
import { describe, expect, it } from "vitest";
import {
  type CurveKeys,
  type CurveOptions,
  curveClient,
  curveKeyPair,
  curveKeysOf,
  curveServer,
} from "./curve.js";
import { nullMechanism, type ZmtpEvent, type ZmtpMechanism, ZmtpSession } from "./session.js";

const keysOf = (text: string) => curveKeysOf(Buffer.from(text));
const OWN = keysOf("the shared key of this test");
const OTHER = keysOf("another key than that of this test");
const hex = (bytes: Uint8Array | undefined) => Buffer.from(bytes ?? []).toString("hex");
const fill = (byte: number) => (count: number) => new Uint8Array(count).fill(byte);

/** The random numbers of a connection that is made again in the same way. */
const fixed = (byte: number): Partial<CurveOptions> => ({
  random: fill(byte),
  newKeyPair: () => curveKeyPair(fill(byte)(32)),
});
const serverOf = (keys: readonly CurveKeys[] = [OWN], given: Partial<CurveOptions> = {}) =>
  curveServer({ socketType: "ROUTER", keys: () => keys, ...given });
const clientOf = (keys: readonly CurveKeys[] = [OWN], given: Partial<CurveOptions> = {}) =>
  curveClient({ socketType: "REQ", keys: () => keys, ...given });

function failure(run: () => unknown): KvError {
  try {
    run();
  } catch (error) {
    if (KvError.is(error)) return error;
    throw error;
  }
  throw new Error("nothing was refused");
}

const only = (commands: readonly Uint8Array[]): Uint8Array => {
  const [command] = commands;
  if (command === undefined || commands.length > 1) throw new Error(`${commands.length} commands`);
  return command;
};
const message = (text: string) => ({
  more: false,
  command: false,
  body: new TextEncoder().encode(text),
});

/** A complete handshake, with its commands. */
function opened(server = serverOf(), client = clientOf()) {
  const hello = only(client.open());
  const welcome = only(server.receive(hello).send);
  const initiate = only(client.receive(welcome).send);
  const { send, peer } = server.receive(initiate);
  const ready = only(send);
  return { server, client, hello, welcome, initiate, ready, peer, toClient: client.receive(ready) };
}

describe("the handshake", () => {
  it("has the bytes that TweetNaCl makes of the same keys", () => {
    const known = JSON.parse(
      readFileSync(new URL("../../fixtures/curve.json", import.meta.url), "utf8"),
    ) as Record<string, string>;
    const { server, client, ...made } = opened(
      serverOf([OWN], fixed(0x22)),
      clientOf([OWN], fixed(0x11)),
    );
    expect({
      serverPublic: hex(OWN.server.publicKey),
      clientPublic: hex(OWN.client.publicKey),
      HELLO: hex(made.hello),
      WELCOME: hex(made.welcome),
      INITIATE: hex(made.initiate),
      READY: hex(made.ready),
      request: hex(client.seal(message("hello")).body),
      reply: hex(server.seal(message("there")).body),
    }).toEqual(known);
    expect(made.peer).toMatchObject({ socketType: "REQ" });
    expect(made.toClient.peer).toMatchObject({ socketType: "ROUTER" });
  });

  it("is another one on each connection", () => {
    const [first, second] = [opened(), opened()];
    for (const name of ["hello", "welcome", "initiate", "ready"] as const)
      expect(hex(first[name])).not.toBe(hex(second[name]));
  });

  /** Places in a command: its ends and every eleventh byte, so that each field has some. */
  const samples = (length: number) => [
    ...Array.from({ length: Math.ceil(length / 11) }, (_, at) => at * 11),
    length - 1,
  ];

  it("refuses a command that was changed in any byte, ends early, is too long, or comes out of order", () => {
    // The same numbers make the same connection each time.
    const client = () => clientOf([OWN], fixed(0x11));
    const server = () => serverOf([OWN], fixed(0x22));
    const made = opened(server(), client());
    const after = (receiver: ZmtpMechanism, ...received: readonly Uint8Array[]) => {
      receiver.open();
      for (const command of received) receiver.receive(command);
      return receiver;
    };
    const stages = [
      { command: made.hello, receiver: () => server() },
      { command: made.welcome, receiver: () => after(client()) },
      { command: made.initiate, receiver: () => after(server(), made.hello) },
      { command: made.ready, receiver: () => after(client(), made.welcome) },
    ];
    for (const [stage, { command, receiver }] of stages.entries()) {
      const places = samples(command.byteLength);
      const wrong = [
        // The padding of HELLO means nothing.
        ...places
          .filter((at) => stage > 0 || at < 8 || at >= 80)
          .map((at) => command.map((byte, index) => (index === at ? byte ^ 0x40 : byte))),
        ...places.map((end) => command.subarray(0, end)),
        Buffer.concat([command, Uint8Array.of(0)]),
        ...stages.filter((_, other) => other !== stage).map((other) => other.command),
      ];
      for (const [at, sent] of wrong.entries())
        expect(failure(() => receiver().receive(sent)).code, `stage ${stage}, ${at}`).toMatch(
          /MALFORMED|UNTRUSTED/,
        );
    }
  });

  it("refuses commands that were recorded on another connection", () => {
    const recorded = opened();
    const server = serverOf();
    server.receive(recorded.hello);
    const replayed = failure(() => server.receive(recorded.initiate));
    expect(replayed.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(replayed.message).toContain("cookie");
    const client = clientOf();
    client.open();
    expect(failure(() => client.receive(recorded.welcome)).code).toBe("KV_HANDSHAKE_UNTRUSTED");
    const second = clientOf();
    second.receive(only(serverOf().receive(only(second.open())).send));
    expect(failure(() => second.receive(recorded.ready)).code).toBe("KV_HANDSHAKE_UNTRUSTED");
  });

  it.each([
    ["another server key", { server: OTHER.server, client: OWN.client }, "another server key"],
    [
      "a client key that is not accepted",
      { server: OWN.server, client: OTHER.client },
      "client key is not",
    ],
    [
      "the public client key without its secret",
      {
        server: OWN.server,
        client: { publicKey: OWN.client.publicKey, privateKey: OTHER.client.privateKey },
      },
      "does not prove",
    ],
  ])("refuses a client with %s", (_, keys, why) => {
    const error = failure(() => opened(serverOf(), clientOf([keys])));
    expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(error.message).toContain(why);
  });

  it("a client refuses a server that has the public key without its secret", () => {
    const stolen = {
      server: { publicKey: OWN.server.publicKey, privateKey: OTHER.server.privateKey },
      client: OWN.client,
    };
    const client = clientOf([OWN]);
    // Such a server cannot open HELLO; it answers one that another client made for it.
    const welcome = only(serverOf([OTHER]).receive(only(clientOf([OTHER]).open())).send);
    client.open();
    expect(failure(() => client.receive(welcome)).message).toContain("expected server key");
    expect(failure(() => serverOf([stolen]).receive(only(clientOf().open()))).code).toBe(
      "KV_HANDSHAKE_UNTRUSTED",
    );
  });

  it("refuses keys of low order", () => {
    const hello = only(clientOf().open()).slice();
    hello.fill(0, 80, 112);
    const error = failure(() => serverOf().receive(hello));
    expect(error.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(error.message).toContain("public key is not valid");
  });

  it("two keys: a server accepts both, a client uses the first, and a removed key ends its connections", () => {
    expect(opened(serverOf([OTHER, OWN]), clientOf([OWN, OTHER])).peer).toBeDefined();
    expect(opened(serverOf([OTHER, OWN]), clientOf([OTHER])).peer).toBeDefined();
    expect(failure(() => opened(serverOf([OTHER]), clientOf([OWN, OTHER]))).code).toBe(
      "KV_HANDSHAKE_UNTRUSTED",
    );
    const keys = [OWN, OTHER];
    const { client, server } = opened(curveServer({ socketType: "ROUTER", keys: () => keys }));
    expect(server.unseal(client.seal(message("one")))).toEqual(message("one"));
    keys.shift();
    expect(failure(() => server.unseal(client.seal(message("two")))).message).toContain(
      "no longer valid",
    );
  });
});

describe("messages", () => {
  it("carry frames of every size, their flags inside", () => {
    const { client, server } = opened();
    fc.assert(
      fc.property(
        fc.uint8Array({ maxLength: 2000 }),
        fc.boolean(),
        fc.boolean(),
        (body, more, command) => {
          const sealed = client.seal({ more, command, body });
          expect([sealed.more, sealed.command, sealed.body.byteLength]).toEqual([
            false,
            false,
            body.byteLength + client.overheadBytes,
          ]);
          expect(server.unseal(sealed)).toEqual({ more, command, body });
        },
      ),
    );
  });

  it("are refused when they were changed, sent before, sent back, out of order or for another connection", () => {
    const refused = (change: (made: ReturnType<typeof opened>) => unknown) =>
      expect(failure(() => change(opened())).code).toBe("KV_HANDSHAKE_UNTRUSTED");
    for (let at = 8; at < 38; at += 1) {
      refused(({ client, server }) => {
        const sealed = client.seal(message("hello"));
        sealed.body[at] = (sealed.body[at] ?? 0) ^ 1;
        server.unseal(sealed);
      });
    }
    refused(({ client, server }) => {
      const sealed = client.seal(message("hello"));
      server.unseal(sealed);
      server.unseal(sealed);
    });
    refused(({ client }) => client.unseal(client.seal(message("hello"))));
    refused(({ client, server }) => {
      const [first, second] = [client.seal(message("first")), client.seal(message("second"))];
      server.unseal(second);
      server.unseal(first);
    });
    refused(({ client }) => opened().server.unseal(client.seal(message("hello"))));
    const { client, server } = opened();
    const malformed = [
      message("plain"),
      { ...client.seal(message("hello")), more: true },
      message(""),
    ];
    for (const frame of malformed)
      expect(failure(() => server.unseal(frame)).code).toBe("KV_WIRE_MALFORMED");
  });
});

const limits = { maxFrames: 4, maxMessageBytes: 1000 };
const router = (mechanism?: ZmtpMechanism) =>
  new ZmtpSession({ socketType: "ROUTER", peerTypes: ["REQ"], ...limits, mechanism });
const req = (mechanism?: ZmtpMechanism) =>
  new ZmtpSession({ socketType: "REQ", peerTypes: ["ROUTER"], ...limits, mechanism });

function events(session: ZmtpSession, chunks: readonly Uint8Array[]): ZmtpEvent[] {
  const all: ZmtpEvent[] = [];
  for (const chunk of chunks) {
    session.push(chunk);
    for (let event = session.read(); event !== undefined; event = session.read()) all.push(event);
  }
  return all;
}

/** Exchanges what both sides send until neither has more. Returns the server's messages. */
function run(client: ZmtpSession, server: ZmtpSession, toServer: readonly Uint8Array[]) {
  const sent = (made: readonly ZmtpEvent[]) =>
    made.flatMap((event) => (event.type === "send" ? event.chunks : []));
  const messages: (readonly Uint8Array[])[] = [];
  let chunks = toServer;
  while (chunks.length > 0) {
    const made = events(server, chunks);
    for (const event of made) if (event.type === "message") messages.push(event.frames);
    chunks = sent(events(client, sent(made)));
  }
  return messages;
}

describe("a session", () => {
  it("with CURVE exchanges messages of any frames within its limits, which count what is inside", () => {
    const [client, server] = [req(clientOf()), router(serverOf())];
    run(client, server, greetings(client, server));
    const frames = [new Uint8Array(0), fill(7)(600), fill(8)(400)];
    expect(run(client, server, client.encode(frames))).toEqual([frames]);
    const error = failure(() => run(client, server, client.encode([fill(7)(600), fill(8)(401)])));
    expect(error.message).toBe("ZMTP: a message of at least 1001 bytes; the limit is 1000");
  });

  it("refuses a HELLO and an INITIATE that are too long when their headers arrive", () => {
    const server = router(serverOf());
    const client = clientOf();
    events(server, [req(client).greeting]);
    expect(failure(() => events(server, [Uint8Array.of(4, 201)])).message).toBe(
      "ZMTP: a command of 201 bytes; the limit is 200",
    );
    const second = router(serverOf());
    events(second, [req(client).greeting, Uint8Array.of(4, 200), only(client.open())]);
    expect(failure(() => events(second, [Uint8Array.of(6, 0, 0, 0, 0, 0, 0, 4, 1)])).message).toBe(
      "ZMTP: a command of 1025 bytes; the limit is 1024",
    );
  });

  it("never speaks NULL with a peer of CURVE, nor the other way round, and names both mechanisms", () => {
    const mechanisms = (one: ZmtpSession, other: ZmtpSession) =>
      failure(() => events(one, [other.greeting]));
    const asServer = mechanisms(router(serverOf()), req(nullMechanism({ socketType: "REQ" })));
    expect(asServer.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(asServer.message).toContain(
      "the peer's security mechanism is \"NULL\", this side's is CURVE",
    );
    expect(mechanisms(req(clientOf()), router()).code).toBe("KV_HANDSHAKE_UNTRUSTED");
    const without = mechanisms(req(), router(serverOf()));
    expect(without.code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(without.message).toContain(
      "the peer's security mechanism is \"CURVE\", this side's is NULL",
    );
    expect(mechanisms(router(), req(clientOf())).code).toBe("KV_HANDSHAKE_UNTRUSTED");
    expect(mechanisms(router(serverOf()), router(serverOf())).message).toContain(
      "both sides are the server",
    );
  });

  it("reads any bytes or refuses them with a KvError, in each state", () => {
    fc.assert(
      fc.property(fc.uint8Array({ maxLength: 400 }), fc.nat(3), (noise, state) => {
        const server = router(serverOf());
        const client = clientOf();
        const hello = Buffer.concat([Uint8Array.of(4, 200), only(client.open())]);
        const command = Buffer.concat([Uint8Array.of(4, noise.byteLength & 0xff), noise]);
        try {
          if (state > 0) events(server, [req(client).greeting]);
          if (state > 1) events(server, [hello]);
          events(server, [state > 2 ? command : noise]);
        } catch (error) {
          if (!KvError.is(error)) throw error;
        }
      }),
      { numRuns: 500 },
    );
  });
});

/** The client's greeting and its answer to the server's. */
function greetings(client: ZmtpSession, server: ZmtpSession): readonly Uint8Array[] {
  const first = events(client, [server.greeting]);
  return [
    client.greeting,
    ...first.flatMap((event) => (event.type === "send" ? event.chunks : [])),
  ];
}
