// A long suite: waits for the limits of the picker.
import { once } from "node:events";
import { connect as http2Connect } from "node:http2";
import { connect, type Socket } from "node:net";
import { ADMIN_LIMITS } from "@kv/fleet/front-end";
import { after, manualClock } from "@kv/testing/manual-clock";
import { expect, onTestFinished, test } from "vitest";
import type { PickerOptions } from "../src/index.js";
import { clientOf, GatewayRequest, runPicker, send, subsetHint } from "./support/gateway.js";
import { PICKER_LIMITS } from "./support/picker-limits.js";

async function start(options: PickerOptions = {}) {
  const running = await runPicker(options);
  return { ...running, client: clientOf(running.port) };
}

function openSocket(port: number, localAddress = "127.0.0.1"): Socket {
  const socket = connect({ port, host: "127.0.0.1", localAddress }).on("error", () => {});
  onTestFinished(() => void socket.destroy());
  return socket;
}

/** Whether a new connection from an address gets the HTTP/2 settings of the server. */
async function serves(port: number, localAddress: string): Promise<boolean> {
  const socket = openSocket(port, localAddress);
  const session = http2Connect(`http://127.0.0.1:${port}`, { createConnection: () => socket });
  onTestFinished(() => void session.destroy());
  session.on("error", () => {});
  return Promise.race([
    once(session, "remoteSettings").then(() => true),
    once(socket, "close").then(() => false),
  ]);
}

const statusOf = async (request: GatewayRequest) => (await request.refusal()).status;

/** A request that a picker with these limits refuses. */
async function refuses(
  status: number,
  limits: PickerOptions["limits"],
  ...request: SentRequest
): Promise<void> {
  const { client } = await start({ limits });
  expect(await statusOf(send(client, ...request))).toBe(status);
}

/** A picker that has one request takes no second one. */
async function refusesSecond(limits: PickerOptions["limits"]): Promise<void> {
  const { client } = await start({ limits });
  await send(client).choice();
  expect(await statusOf(send(client))).toBe(429);
}

type SentRequest = Parameters<typeof send> extends [unknown, ...infer Rest] ? Rest : never;

/** What happens at each limit. */
const AT_THE_LIMIT: Readonly<Record<string, () => Promise<unknown>>> = {
  "limits.connections": async () => {
    const { port } = await start({ limits: { connections: 1 } });
    openSocket(port);
    await once(openSocket(port), "close");
  },
  "limits.connectionsPerAddress": async () => {
    const { port } = await start({ limits: { connections: 10, connectionsPerAddress: 2 } });
    const [first, second] = [openSocket(port), openSocket(port)];
    await Promise.all([once(first, "connect"), once(second, "connect")]);
    await once(openSocket(port), "close");
    // Another address is served, and the first one again once it has closed a connection.
    expect(await serves(port, "127.0.0.2")).toBe(true);
    first.destroy();
    await expect.poll(() => serves(port, "127.0.0.1")).toBe(true);
  },
  "limits.requestsPerConnection": async () => {
    const { port } = await start({ limits: { requestsPerConnection: 7 } });
    const session = http2Connect(`http://127.0.0.1:${port}`);
    onTestFinished(() => void session.destroy());
    const [settings] = await once(session, "remoteSettings");
    expect(settings).toMatchObject({ maxConcurrentStreams: 7 });
  },
  "limits.requestsInFlight": () => refusesSecond({ requestsInFlight: 1 }),
  "limits.requestsPerDecode": () => refusesSecond({ requestsPerDecode: 1 }),
  "limits.messageLengthBytes": async () => {
    const { client } = await start({ limits: { messageLengthBytes: 1_000 } });
    expect((await send(client, { prompt: "a".repeat(1_000) }).ended).code).toBe(8);
  },
  "limits.bodyLengthBytes": async () => {
    const { client } = await start({ limits: { bodyLengthBytes: 100 } });
    expect(await statusOf(send(client, { prompt: "a".repeat(100) }))).toBe(413);
    const announced = new GatewayRequest(client);
    announced.headers({ "content-length": "101" });
    expect(await statusOf(announced)).toBe(413);
  },
  "limits.bodiesLengthBytes": async () => {
    const limits = { bodyLengthBytes: 100_000, bodiesLengthBytes: 100_000 };
    const { client } = await start({ limits });
    const begun = [80_000, 60_000].map((length) => {
      const request = new GatewayRequest(client);
      request.headers({});
      request.body(`{"prompt":"${"a".repeat(length)}`, false);
      return statusOf(request);
    });
    expect(await Promise.race(begun)).toBe(429);
  },
  "limits.bodyDepth": () => refuses(400, { bodyDepth: 3 }, '{"a":[[[1]]]}'),
  "limits.bodyMembers": () => refuses(400, { bodyMembers: 3 }, '{"a":1,"b":1,"c":1}'),
  "limits.bodyValues": () => refuses(400, { bodyValues: 3 }, '{"prompt":[1,2,3,4,5]}'),
  "top-level members of a body": () => {
    const members = Array.from({ length: 1_001 }, (_, i) => `"m${i}":1`);
    return refuses(400, {}, `{${members.join(",")}}`);
  },
  "limits.subsetEndpoints": () => {
    const hint = subsetHint(["127.0.0.1:21", "127.0.0.1:22"]);
    return refuses(400, { subsetEndpoints: 1 }, undefined, {}, hint);
  },
  "length of X-Request-Id": () => refuses(400, {}, undefined, { "x-request-id": "a".repeat(129) }),
  "timeouts.receiveMs": async () => {
    const clock = manualClock();
    const { client } = await start({ clock, timeouts: { receiveMs: 1_000 } });
    const request = new GatewayRequest(client);
    request.headers({});
    request.body("{", false);
    await expect.poll(after(clock, 1_000, () => request.answers.length)).toBe(1);
    expect(await statusOf(request)).toBe(408);
  },
  "timeouts.idleMs": async () => {
    const { port } = await start({ timeouts: { idleMs: 50 } });
    const session = http2Connect(`http://127.0.0.1:${port}`);
    await once(session, "close");
  },
  "metrics: connections": async () => {
    const { metricsUrl } = await start({ metricsServer: { port: 0 } });
    const { port } = new URL(metricsUrl);
    const { connections, connectionsPerAddress } = ADMIN_LIMITS;
    const sockets = Array.from({ length: connections }, (_, at) =>
      openSocket(Number(port), `127.0.0.${2 + Math.floor(at / connectionsPerAddress)}`),
    );
    await Promise.all(sockets.map((socket) => once(socket, "connect")));
    openSocket(Number(port));
    await Promise.race(sockets.map((socket) => once(socket.resume(), "close")));
  },
  "metrics: connections per address": async () => {
    const { metricsUrl } = await start({ metricsServer: { port: 0 } });
    const port = Number(new URL(metricsUrl).port);
    const sockets = Array.from({ length: ADMIN_LIMITS.connectionsPerAddress }, () =>
      openSocket(port),
    );
    await Promise.all(sockets.map((socket) => once(socket, "connect")));
    // The oldest idle connection of the address makes room.
    openSocket(port);
    await Promise.race(sockets.map((socket) => once(socket.resume(), "close")));
    const other = openSocket(port, "127.0.0.2");
    other.write("GET /status HTTP/1.1\r\nhost: a\r\n\r\n");
    const [answer] = await once(other, "data");
    expect(String(answer)).toMatch(/^HTTP\/1\.1 200 /);
  },
  "metrics: headers": async () => {
    const { metricsUrl } = await start({ metricsServer: { port: 0 } });
    const headers = { "x-long": "a".repeat(ADMIN_LIMITS.headersLengthBytes) };
    expect((await fetch(`${metricsUrl}/status`, { headers })).status).toBe(431);
  },
  "metrics: time of a request": async () => {
    const { metricsUrl } = await start({ metricsServer: { port: 0 } });
    const socket = openSocket(Number(new URL(metricsUrl).port));
    socket.write("GET /status HTTP/1.1\r\n");
    const [answer] = await once(socket, "data");
    expect(String(answer)).toMatch(/^HTTP\/1\.1 408 /);
  },
};

test("each limit is tried here", () => {
  expect(Object.keys(AT_THE_LIMIT)).toEqual(PICKER_LIMITS.map(({ name }) => name));
});

test.each(Object.entries(AT_THE_LIMIT))("%s", async (_name, reach) => {
  await reach();
});
