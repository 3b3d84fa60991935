// A long suite: Envoy, kv-epp, sidecars and engines, in processes of their own.
import { createHash, randomBytes } from "node:crypto";
import { once } from "node:events";
import { createServer, type IncomingHttpHeaders, type ServerResponse } from "node:http";
import { connect } from "node:net";
import { createProxy } from "@kv/proxy";
import { listening } from "@kv/testing/http/listening";
import { isLongRun, someOf } from "@kv/testing/long-run";
import { afterAll, beforeAll, describe, expect, test } from "vitest";
import type { Cluster } from "../../apps/demo/src/cluster/cluster.js";
import { complete } from "../../apps/demo/src/run/completion-client.js";
import { expectAllIdle, preparedRun, startPair } from "../../apps/demo/test/support/matrix.js";
import { type EnvoyProcess, startEnvoy } from "./envoy-process.js";
import { envoyMissing } from "./support/envoy-missing.js";
import { type RunningPicker, startPicker } from "./support/start-picker.js";

const closers: (() => unknown)[] = [];
afterAll(async () => {
  for (const close of closers.splice(0).reverse()) await close();
});

/** Requests on one connection of Envoy to the picker. */
const MANY = isLongRun ? 5000 : 200;
const PREFILL = "127.0.0.1:9";
const COMPLETIONS = "/v1/completions";
/** Quick enough for a test; pairing reads side channels, which these instances do not have. */
const PICKER = [
  "--pairing",
  "off",
  "--health-interval-ms",
  "200",
  "--body-limit-bytes",
  "33554432",
];

interface Seen {
  readonly headers: IncomingHttpHeaders;
  readonly path: string;
  /** SHA-256 of the body. */
  readonly digest: string;
  readonly response: ServerResponse;
  /** Resolves when the gateway has left before the answer was complete. */
  readonly dropped: Promise<void>;
}

/** A decode instance that answers by `answer`. It digests bodies, and does not parse them. */
async function startDecode(answer: (seen: Seen) => void) {
  const server = createServer((request, response) => {
    const { url: path = "", headers } = request;
    if (path === "/health") return void response.end();
    const hash = createHash("sha256");
    const dropped = new Promise<void>((resolve) => {
      response.once("close", () => {
        if (!response.writableFinished) resolve();
      });
    });
    request.on("data", (chunk: Buffer) => hash.update(chunk));
    request.on("end", () =>
      answer({ headers, path, digest: hash.digest("hex"), response, dropped }),
    );
    request.on("error", () => {});
  });
  const endpoint = `127.0.0.1:${await listening(server)}`;
  const close = async () => {
    const closed = new Promise((resolve) => server.close(resolve));
    server.closeAllConnections();
    await closed;
  };
  closers.push(close);
  return { endpoint, close };
}

const post = (
  url: string,
  body = '{"prompt":"a"}',
  headers: Record<string, string> = {},
  signal?: AbortSignal,
) =>
  fetch(`${url}${COMPLETIONS}`, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers },
    body,
    signal: signal ?? null,
  });

async function inFlight({ metricsUrl }: RunningPicker): Promise<number> {
  const status = (await (await fetch(`${metricsUrl}/status`)).json()) as {
    readonly in_flight: number;
  };
  return status.in_flight;
}

describe.skipIf(envoyMissing !== undefined)(
  `client → Envoy → kv-epp → D (${envoyMissing ?? "found"})`,
  () => {
    let answer: (seen: Seen) => void = ({ response }) => void response.end("{}");
    let decodes: Awaited<ReturnType<typeof startDecode>>[] = [];
    let picker: RunningPicker;
    /** Refuses requests while no picker answers. */
    let closed: EnvoyProcess;
    /** Lets requests pass then. */
    let open: EnvoyProcess;
    let args: string[] = [];

    beforeAll(async () => {
      const start = () => startDecode((seen) => answer(seen));
      // A prefill instance that is healthy; a fake D reads no KV from it.
      const [prefill, ...others] = await Promise.all([start(), start(), start()]);
      decodes = others;
      const endpoints = decodes.map(({ endpoint }) => endpoint);
      args = [...PICKER, "--prefill", prefill?.endpoint ?? PREFILL, "--decode", ...endpoints];
      picker = await startPicker(args);
      closers.push(() => picker.kill());
      const options = { pickerPort: picker.port, endpoints };
      [closed, open] = await Promise.all([
        startEnvoy({ ...options, failOpen: false }),
        startEnvoy({ ...options, failOpen: true }),
      ]);
      closers.push(() => Promise.all([closed.stop(), open.stop()]));
    });

    test.each([
      ["300 KB", 300_000],
      ["20 MB", 20_000_000],
    ])("a body of %s reaches D byte for byte", async (_name, length) => {
      const body = JSON.stringify({ prompt: randomBytes((length * 3) / 4).toString("base64") });
      answer = ({ digest, headers, response }) =>
        void response.end(JSON.stringify({ digest, prefill: headers["x-prefiller-host-port"] }));
      const got = (await (await post(closed.url, body)).json()) as Record<string, string>;
      expect(got["digest"]).toBe(createHash("sha256").update(body).digest("hex"));
      expect(got["prefill"]).toMatch(/^127\.0\.0\.1:\d+$/);
    });

    test("a stream passes byte for byte, each piece before the next one is written", async () => {
      const pieces = Array.from({ length: 20 }, (_, i) => randomBytes(i * 997 + 1));
      let writeNext = () => {};
      answer = ({ response }) => {
        response.writeHead(200, { "content-type": "text/event-stream" });
        const left = [...pieces];
        writeNext = () => {
          const piece = left.shift();
          if (piece === undefined) response.end();
          else response.write(piece);
        };
        writeNext();
      };
      const got: Buffer[] = [];
      let arrived = 0;
      const { body } = await post(closed.url, '{"prompt":"a","stream":true}');
      for await (const chunk of body as unknown as AsyncIterable<Uint8Array>) {
        got.push(Buffer.from(chunk));
        arrived += chunk.length;
        const whole = pieces.map((_, i) =>
          pieces.slice(0, i + 1).reduce((sum, { length }) => sum + length, 0),
        );
        if (whole.includes(arrived)) writeNext();
      }
      expect(Buffer.concat(got).equals(Buffer.concat(pieces))).toBe(true);
    });

    test("a client that leaves before D answers, or in the middle of a stream, is dropped at D", async () => {
      const seen: Seen[] = [];
      answer = (one) => {
        seen.push(one);
        if (one.headers["x-begins"] !== undefined) one.response.writeHead(200).write("data: 1\n\n");
      };
      const early = new AbortController();
      const first = post(closed.url, undefined, {}, early.signal).catch(() => "left");
      await expect.poll(() => seen.length).toBe(1);
      early.abort();
      expect(await first).toBe("left");
      const late = new AbortController();
      const streaming = await post(closed.url, undefined, { "x-begins": "1" }, late.signal);
      expect(streaming.status).toBe(200);
      late.abort();
      await Promise.all(seen.map(({ dropped }) => dropped));
      await expect.poll(() => inFlight(picker)).toBe(0);
    });

    test("a client that leaves while it sends its body: no D sees it, and the picker forgets it", async () => {
      let reached = 0;
      answer = ({ response }) => {
        reached += 1;
        response.end("{}");
      };
      const socket = connect(Number(new URL(closed.url).port), "127.0.0.1").on("error", () => {});
      await once(socket, "connect");
      socket.write(
        `POST ${COMPLETIONS} HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n{"prompt":"`,
      );
      await expect.poll(() => inFlight(picker)).toBe(1);
      socket.destroy();
      await expect.poll(() => inFlight(picker)).toBe(0);
      expect(reached).toBe(0);
    });

    test("refusals of the picker reach the client with their status and reason", async () => {
      const body = '{"prompt":"a","kv_transfer_params":{"remote_host":"evil"}}';
      const forged = await post(closed.url, body);
      expect(forged.status).toBe(400);
      expect(forged.headers.get("content-type")).toBe("application/json");
      expect(await forged.json()).toMatchObject({ error: { code: "KV_REQUEST_INVALID" } });
    });

    test("while the picker is away, one Envoy refuses and the other has D compute alone; when it is back, both have it choose", async () => {
      const named: (string | undefined)[] = [];
      answer = ({ headers, response }) => {
        named.push(headers["x-prefiller-host-port"] as string | undefined);
        response.end("{}");
      };
      const forged = { "x-prefiller-host-port": "evil:1" };
      const statusOf = async ({ url }: EnvoyProcess) => (await post(url, undefined, forged)).status;
      await picker.kill();
      expect(await statusOf(closed)).toBe(503);
      // As soon as Envoy's health checks have seen it.
      await expect.poll(() => statusOf(open)).toBe(200);
      expect(named).toEqual([undefined]);
      picker = await startPicker(args, picker.port);
      await expect.poll(() => statusOf(closed)).toBe(200);
      await expect.poll(() => statusOf(open)).toBe(200);
      await expect
        .poll(async () => {
          await statusOf(open);
          return named.at(-1);
        })
        .toMatch(/^127\.0\.0\.1:\d+$/);
      expect(named).not.toContain("evil:1");
    });

    test("a picker that ends lets a stream end, and Envoy drains without breaking one", async () => {
      let finish = () => {};
      answer = ({ response }) => {
        response.writeHead(200).write("data: 1\n\n");
        finish = () => void response.end("data: [DONE]\n\n");
      };
      const streamed = async () => {
        const response = await post(closed.url, '{"prompt":"a","stream":true}');
        return { text: response.text() };
      };
      const first = await streamed();
      const stopped = picker.stop();
      // Its health says that it ends; requests are served until it has.
      await new Promise((resolve) => setTimeout(resolve, 100));
      finish();
      expect(await first.text).toBe("data: 1\n\ndata: [DONE]\n\n");
      expect(await stopped).toBe(0);
      picker = await startPicker(args, picker.port);
      await expect.poll(async () => (await post(closed.url, "{")).status).toBe(400);

      const second = await streamed();
      await fetch(`${closed.adminUrl}/drain_listeners?graceful`, { method: "POST" });
      finish();
      expect(await second.text).toBe("data: 1\n\ndata: [DONE]\n\n");
    });

    test(`${MANY} requests on the one connection to the picker: each is answered`, async () => {
      answer = ({ response }) => void response.end("{}");
      let sent = 0;
      const statuses = new Set<number>();
      const client = async () => {
        while (sent < MANY) {
          sent += 1;
          const response = await post(closed.url);
          statuses.add(response.status);
          await response.arrayBuffer();
        }
      };
      await Promise.all(Array.from({ length: 32 }, client));
      expect([...statuses]).toEqual([200]);
    });

    test("a subset hint of the gateway limits the choice", async () => {
      const seen: string[] = [];
      answer = ({ headers, response }) => {
        seen.push(String(headers["x-gateway-destination-endpoint"]));
        response.end("{}");
      };
      const [, second = { endpoint: "" }] = decodes;
      const endpoints = decodes.map(({ endpoint }) => endpoint);
      const options = { pickerPort: picker.port, endpoints, failOpen: false };
      const hinted = await startEnvoy({ ...options, subset: [second.endpoint] });
      closers.push(() => hinted.stop());
      for (let i = 0; i < 3; i += 1) expect((await post(hinted.url)).status).toBe(200);
      expect(seen).toEqual([second.endpoint, second.endpoint, second.endpoint]);
    });

    test("D dies: its stream is broken off, and every request is answered by the other one", async () => {
      answer = ({ response }) => void response.writeHead(200).write("data: 1\n\n");
      const streams = await Promise.all([1, 2].map(() => post(open.url)));
      const texts = streams.map((each) => each.text().catch(() => "broken off"));
      answer = ({ response }) => void response.end("{}");
      await decodes[0]?.close();
      // The stream of the one that died does not look complete; the other one goes on.
      expect(await Promise.race(texts)).toBe("broken off");
      const statuses = await Promise.all(
        Array.from({ length: 8 }, async () => (await post(open.url)).status),
      );
      expect(statuses).toEqual(statuses.map(() => 200));
    });
  },
);

const MB = 1_000_000;
/** The largest bodies, each place above the one behind it. */
const BODY_LIMITS = { engine: 24 * MB, sidecar: 26 * MB, picker: 28 * MB };

/** The program beside each decode instance. */
const beside = (decode: string, mode: "pull" | "push") =>
  createProxy({
    mode,
    decoders: [decode],
    sidecar: { allow: ["127.0.0.1"] },
    pairing: { mode: "off" },
    limits: { bodyLengthBytes: BODY_LIMITS.sidecar },
  });

const MODES = [
  ["push", "NixlPushConnector"],
  ["pull", "NixlConnector"],
] as const;
describe.skipIf(envoyMissing !== undefined).each(someOf(MODES, 2))(
  "client → Envoy → kv-epp → sidecar → P and D, %s (engines of the demo)",
  (mode, connector) => {
    let cluster: Cluster;
    let envoy: EnvoyProcess;

    beforeAll(async () => {
      cluster = await startPair({
        connector,
        decodes: 2,
        leaseSeconds: 2,
        instance: { httpLimits: { maxBodyBytes: BODY_LIMITS.engine } },
      });
      closers.push(() => cluster.close());
      const prefill = cluster.prefills[0]?.url ?? "";
      const sidecars = await Promise.all(
        cluster.decodes.map(async ({ url: decode }) => {
          const sidecar = beside(decode, mode);
          closers.push(() => sidecar.close({ graceMs: 0 }));
          return new URL((await sidecar.listen({ port: 0 })).url).host;
        }),
      );
      const picker = await startPicker([
        ...PICKER,
        "--body-limit-bytes",
        `${BODY_LIMITS.picker}`,
        "--prefill",
        new URL(prefill).host,
        "--decode",
        ...sidecars,
      ]);
      closers.push(() => picker.kill());
      envoy = await startEnvoy({ pickerPort: picker.port, endpoints: sidecars, failOpen: false });
      closers.push(() => envoy.stop());
    });

    test("every token is the reference's, and nothing is held after it", async () => {
      const { prompts, expected } = await preparedRun();
      const tokens = await Promise.all(
        prompts.map(async (prompt, i) => {
          const wanted = { promptTokens: prompt, maxTokens: expected[i]?.length ?? 0 };
          return (await complete({ url: envoy.url, requestId: `${mode}-${i}`, ...wanted })).tokens;
        }),
      );
      expect(tokens.map((each) => [...each])).toEqual(expected.map((each) => [...each]));
      await expectAllIdle(cluster);
    });

    /** Sends a prompt in a body of about `length` bytes. */
    async function padded(length: number): Promise<Response> {
      const { prompts, expected } = await preparedRun();
      const asked = {
        prompt: prompts[0],
        max_tokens: expected[0]?.length,
        temperature: 0,
        ignore_eos: true,
      };
      return post(
        envoy.url,
        JSON.stringify({ ...asked, return_token_ids: true, user: "u".repeat(length) }),
      );
    }

    test("a body of 20 MB gets its tokens", async () => {
      const answer = (await (await padded(20 * MB)).json()) as {
        readonly choices: readonly { readonly token_ids: readonly number[] }[];
      };
      expect(answer.choices[0]?.token_ids).toEqual([...((await preparedRun()).expected[0] ?? [])]);
    });

    test.each([
      ["the engines", BODY_LIMITS.engine],
      ["the sidecar", BODY_LIMITS.sidecar],
      ["the picker", BODY_LIMITS.picker],
    ])(
      "a body above the limit of %s gets 413 with that limit, and nothing is held",
      async (_, limit) => {
        const answer = await padded(limit);
        expect(answer.status).toBe(413);
        expect(await answer.text()).toContain(`${limit} bytes`);
        await expectAllIdle(cluster);
      },
    );

    test("clients that leave at any moment leave nothing held", async () => {
      const { prompts } = await preparedRun();
      await Promise.all(
        prompts.map(async (prompt, i) => {
          const leaving = new AbortController();
          setTimeout(() => leaving.abort(), i * 10);
          const body = JSON.stringify({ prompt, max_tokens: 200, stream: true, ignore_eos: true });
          await post(envoy.url, body, {}, leaving.signal)
            .then((response) => response.text())
            .catch(() => "left");
        }),
      );
      await expectAllIdle(cluster);
    });
  },
);
