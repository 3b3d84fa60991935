import { mkdtempSync, renameSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { connect as tlsConnect } from "node:tls";
import { ChannelCredentials } from "@grpc/grpc-js";
import { leastLoad, type RoutingContext } from "@kv/fleet";
import { selfSigned } from "@kv/http";
import { type LogFields, silentLog } from "@kv/interface";
import { type Answer, sendJson, startUpstream } from "@kv/testing/http/fake-upstream";
import { startSideChannel } from "@kv/testing/http/side-channel";
import { manualClock } from "@kv/testing/manual-clock";
import { recordedSpans } from "@kv/testing/recorded-spans";
import { expect, onTestFinished, test } from "vitest";
import { checkHealth, clientOf, D, P, runPicker, send } from "./support/gateway.js";

async function upstream(answer: Answer): Promise<string> {
  const { url, close } = await startUpstream(answer);
  onTestFinished(close);
  return url;
}

const trusting = () =>
  ChannelCredentials.createSsl(null, null, null, { rejectUnauthorized: false });

/** The certificate that a port presents. */
function presented(port: number): Promise<string> {
  return new Promise((resolve, reject) => {
    const socket = tlsConnect({ port, rejectUnauthorized: false, ALPNProtocols: ["h2"] }, () => {
      resolve(socket.getPeerX509Certificate()?.toString() ?? "");
      socket.destroy();
    });
    socket.once("error", reject);
  });
}

test("by default it speaks TLS with a certificate that it makes, and nothing else", async () => {
  const { port } = await runPicker({ tls: true });
  expect((await send(clientOf(port, trusting())).choice()).destination).toBe(D);
  const { code } = await send(clientOf(port)).ended;
  expect(code).toBe(14);
});

/** Two pairs, the first of them in files. */
async function tlsFiles() {
  const folder = mkdtempSync(join(tmpdir(), "kv-epp-tls-"));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const [certFile, keyFile] = [join(folder, "tls.crt"), join(folder, "tls.key")];
  const first = await selfSigned("test", Date.now());
  const second = await selfSigned("test", Date.now());
  const write = (file: string, bytes: Buffer) => {
    writeFileSync(`${file}.new`, bytes);
    renameSync(`${file}.new`, file);
  };
  write(certFile, first.certificate);
  write(keyFile, first.privateKey);
  return { certFile, keyFile, first, second, write };
}

test("a certificate is read again when its files change; a wrong pair leaves the one before", async () => {
  const { certFile, keyFile, first, second, write } = await tlsFiles();
  const clock = manualClock();
  const warnings: string[] = [];
  const log = { ...silentLog, warn: (event: string) => void warnings.push(event) };
  const { port } = await runPicker({ tls: { certFile, keyFile }, clock, log });
  expect(await presented(port)).toBe(first.certificate.toString());
  write(certFile, second.certificate);
  clock.advance(10_000);
  expect([await presented(port), warnings]).toEqual([
    first.certificate.toString(),
    ["pairing-off", "certificate-not-read"],
  ]);
  write(keyFile, second.privateKey);
  clock.advance(10_000);
  expect(await presented(port)).toBe(second.certificate.toString());
});

test("a key that is not the certificate's is refused at the start", async () => {
  const { certFile, keyFile, second, write } = await tlsFiles();
  write(keyFile, second.privateKey);
  await expect(runPicker({ tls: { certFile, keyFile } })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: `${keyFile} is not the key of the certificate ${certFile}`,
  });
});

test("gRPC health: live always, ready while a pair is available, on both ports", async () => {
  const { port, healthPort, picker } = await runPicker({
    tls: true,
    healthPort: 0,
  });
  const services = [
    "",
    "liveness",
    "readiness",
    "envoy.service.ext_proc.v3.ExternalProcessor",
    "other",
  ];
  const all = async () => {
    const clients = [clientOf(port, trusting()), clientOf(healthPort)];
    return Promise.all(
      clients.map((client) => Promise.all(services.map((service) => checkHealth(client, service)))),
    );
  };
  const ready = ["SERVING", "SERVING", "SERVING", "SERVING", 5];
  expect(await all()).toEqual([ready, ready]);
  void picker.instances.decode.drain({ url: `http://${D}` });
  const unready = ["NOT_SERVING", "SERVING", "NOT_SERVING", "NOT_SERVING", 5];
  expect(await all()).toEqual([unready, unready]);
});

test("when it closes, it is unready at first and serves on, then requests in flight end, and new ones find nobody", async () => {
  const { port, picker } = await runPicker();
  const client = clientOf(port);
  const running = send(client);
  await running.choice();
  const closed = picker.close({ drainMs: 300, graceMs: 60_000 });
  expect(await checkHealth(client, "readiness")).toBe("NOT_SERVING");
  const late = send(client);
  expect((await late.choice()).destination).toBe(D);
  late.answer(200);
  // Nobody listens.
  await expect.poll(() => checkHealth(clientOf(port), "liveness"), { interval: 100 }).toBe(14);
  running.answer(200);
  expect((await running.ended).code).toBe(0);
  await closed;
});

test("a second close ends requests that do not end", async () => {
  const { port, picker } = await runPicker();
  const stuck = send(clientOf(port));
  await stuck.choice();
  const closed = picker.close({ drainMs: 60_000, graceMs: 60_000 });
  await picker.close();
  await closed;
  expect((await stuck.ended).code).not.toBe(0);
});

/** An instance of an engine with its own side channel. */
async function instanceOf(port: number, vllmVersion: string) {
  const side = await startSideChannel(() => ({ engineId: vllmVersion, vllmVersion }));
  onTestFinished(() => side.close());
  const url = `http://127.0.0.1:${port}`;
  return { url, kv: { host: "127.0.0.1", port: side.port } };
}

test("a P and a D that do not fit are never named together, also in place of others", async () => {
  const [p1, p2] = [await instanceOf(11, "0.32.0"), await instanceOf(12, "0.33.0")];
  const { port } = await runPicker({
    prefillers: [p1, p2],
    decoders: [
      { ...p1, url: "http://127.0.0.1:21" },
      { ...p2, url: "http://127.0.0.1:22" },
    ],
    pairing: { mode: "strict" },
    fallbacks: 3,
  });
  const client = clientOf(port);
  const pairs = new Set<string>();
  for (let i = 0; i < 8; i += 1) {
    const request = send(client);
    const { headers, destination } = await request.choice();
    pairs.add(`${headers["x-prefiller-host-port"]} ${destination}`);
    request.answer(200);
    await request.ended;
  }
  expect([...pairs].sort()).toEqual(["127.0.0.1:11 127.0.0.1:21", "127.0.0.1:12 127.0.0.1:22"]);
});

test("503 says which factor keeps the instances from a pair", async () => {
  const { port } = await runPicker({
    prefillers: [await instanceOf(11, "0.32.0")],
    decoders: [await instanceOf(21, "0.33.0")],
    pairing: { mode: "strict" },
  });
  const { status, error } = await send(clientOf(port)).refusal();
  expect([status, error.code]).toEqual([503, "KV_PROXY_NO_INSTANCE"]);
  expect(error.message).toContain("vllm_version is 0.32.0 at prefill and 0.33.0 at decode");
});

test("an instance that does not answer its health check is not chosen", async () => {
  const dead = await startUpstream(() => {});
  await dead.close();
  const [p, d] = [
    await upstream(({ response }) => sendJson(response, {})),
    await upstream(({ response }) => sendJson(response, {})),
  ];
  const { port, picker } = await runPicker({
    prefillers: [p],
    decoders: [dead.url, d],
    health: { intervalMs: 60_000 },
  });
  await expect.poll(() => picker.status().decoders[0]?.state).toBe("unreachable");
  expect((await send(clientOf(port)).choice()).destination).toBe(d.replace("http://", ""));
});

test("the routing gets the token ids that an instance renders", async () => {
  const seen: RoutingContext[] = [];
  const p = await upstream(({ path, response }) =>
    sendJson(response, path.endsWith("/render") ? { token_ids: [1, 2, 3] } : {}),
  );
  const { port } = await runPicker({
    prefillers: [p],
    decoders: [D],
    createRouting: () => ({
      ...leastLoad(),
      readsTokenIds: () => true,
      choose(candidates, context) {
        seen.push(context);
        return candidates[0];
      },
    }),
  });
  await send(
    clientOf(port),
    { messages: [] },
    { ":path": "/v1/chat/completions", "x-session-id": "s" },
  ).choice();
  for (const { request, headers } of seen)
    expect([Array.from(request?.tokenIds ?? []), headers?.["x-session-id"]]).toEqual([
      [1, 2, 3],
      "s",
    ]);
  expect(seen).toHaveLength(2);
});

test("metrics have kv-proxy's names; /status and /health say the state", async () => {
  const { port, picker, metricsUrl } = await runPicker({
    disaggregateAbove: 1000,
    metricsServer: { port: 0 },
  });
  const client = clientOf(port);
  await send(client).serve();
  await send(client, "{").refusal();
  await expect.poll(() => picker.status().in_flight).toBe(0);
  const text = await (await fetch(`${metricsUrl}/metrics`)).text();
  for (const line of [
    'kv_proxy_requests_total{endpoint="/v1/completions",outcome="200"} 1',
    'kv_proxy_requests_total{endpoint="/v1/completions",outcome="KV_REQUEST_INVALID"} 1',
    'kv_proxy_disaggregation_total{legs="1",reason="short-suffix"} 1',
    `kv_proxy_instance_requests_total{role="decode",server="http://${D}"} 1`,
    "kv_epp_pick_duration_seconds_count 1",
  ])
    expect(text).toContain(line);
  expect(await (await fetch(`${metricsUrl}/status`)).json()).toMatchObject({
    in_flight: 0,
    decoders: [{ requests: 1 }],
  });
  expect((await fetch(`${metricsUrl}/health`)).status).toBe(200);
  void picker.instances.prefill.drain({ url: `http://${P}` });
  expect((await fetch(`${metricsUrl}/health`)).status).toBe(503);
  expect((await fetch(`${metricsUrl}/instances/add`, { method: "POST" })).status).toBe(404);
});

test("a choice is a span in the client's trace, and the instances get it as parent", async () => {
  const { tracer, spans } = recordedSpans();
  const { port } = await runPicker({ tracer });
  const traceId = "0af7651916cd43dd8448eb211c80319c";
  const traceparent = `00-${traceId}-b7ad6b7169203331-01`;
  const { headers } = await send(clientOf(port), undefined, { traceparent }).choice();
  const [span] = spans();
  expect(span).toMatchObject({ name: "kv_epp.pick", traceId, parentSpanId: "b7ad6b7169203331" });
  expect(span?.attributes).toMatchObject({
    "kv.decode": D,
    "kv.prefill": P,
    "url.path": "/v1/completions",
  });
  expect(headers["traceparent"]).toBe(`00-${traceId}-${span?.spanId}-01`);
});

test("the log has one line for each request, without text of bodies and without credentials", async () => {
  const lines: [string, LogFields | undefined][] = [];
  const keep = (event: string, fields?: LogFields) => void lines.push([event, fields]);
  const log = { debug: keep, info: keep, warn: keep, error: keep };
  const { port, picker } = await runPicker({ log });
  const client = clientOf(port);
  const credentials = { authorization: "Bearer secret", cookie: "secret", "x-api-key": "secret" };
  await send(client, { prompt: "secret" }, credentials).serve();
  await send(client, { prompt: "secret", n: "secret" }, credentials).refusal();
  await send(client, '{"prompt": my secret prompt}', credentials).refusal();
  const left = send(client, { prompt: "secret" });
  await left.choice();
  left.leave();
  await expect.poll(() => picker.status().in_flight).toBe(0);
  expect(lines.map(([event]) => event)).toEqual([
    "pairing-off",
    "request-done",
    "request-refused",
    "request-refused",
    "request-aborted",
  ]);
  expect(JSON.stringify(lines)).not.toContain("secret");
});
