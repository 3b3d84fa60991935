import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { COMPLETION, decodeOk, prefillOk, sendJson } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { startCli } from "../support/run-cli.js";
import { post, upstream } from "../support/set-up.js";

const portOf = (url: string) => new URL(url).port;
const SIDECAR = "--sidecar --port 0 --allow-prefill 127.0.0.0/8 --pairing off";

test("kv-proxy with the toy proxy's flags serves, logs, and exits with 0 after SIGTERM and its request in flight", async () => {
  const p = await upstream(prefillOk);
  const d = await upstream(() => {});
  const running = startCli(
    `--port 0 --host 127.0.0.1 --pairing off --prefiller-hosts 127.0.0.1 --prefiller-ports ${portOf(p.url)} --decoder-hosts 127.0.0.1 --decoder-ports ${portOf(d.url)}`,
  );
  const ready = await running.line();
  expect(ready).toContain(`prefill ${p.url} decode ${d.url}`);
  const url = /^kv-proxy ready (\S+)/.exec(ready)?.[1] ?? "";
  const asked = post(`${url}/v1/completions`, { prompt: "a" });
  const sent = () => d.seen.find(({ path }) => path === "/v1/completions");
  await expect.poll(sent).toBeDefined();
  const decode = sent();
  running.child.kill("SIGTERM");
  await expect.poll(running.stderr).toContain('"event":"closing"');
  if (decode !== undefined) void decodeOk(decode);
  expect(await (await asked).json()).toEqual(COMPLETION);
  expect(await running.exited).toBe(0);
  const done = running
    .stderr()
    .split("\n")
    .find((line) => line.includes("request-done"));
  expect(JSON.parse(done ?? "{}")).toMatchObject({ status: 200, prefill: p.url, decode: d.url });
});

test("kv-proxy --sidecar serves with the prefill instance of the header, and the decode instance of --vllm-port", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const running = startCli(`${SIDECAR} --vllm-port ${portOf(d.url)}`);
  const ready = await running.line();
  expect(ready).toContain(`prefill x-prefiller-host-port decode ${d.url}`);
  const url = /^kv-proxy ready (\S+)/.exec(ready)?.[1] ?? "";
  const headers = { "x-prefiller-host-port": new URL(p.url).host };
  const answer = await post(`${url}/v1/completions`, { prompt: "a" }, { headers });
  expect(await answer.json()).toEqual(COMPLETION);
  expect(p.seen).toHaveLength(1);
});

test("kv-proxy --sidecar --data-parallel-size has a port for each rank, and SIGTERM ends all", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const running = startCli(`${SIDECAR} --vllm-port ${portOf(d.url)} --data-parallel-size 2`);
  const lines = [await running.line(), await running.line()];
  const next = `http://127.0.0.1:${Number(portOf(d.url)) + 1}`;
  expect(lines.map((line) => / decode (.*)$/.exec(line)?.[1])).toEqual([d.url, next]);
  const [first = "", second] = lines.map((line) => /^kv-proxy ready (\S+)/.exec(line)?.[1]);
  expect(first).not.toBe(second);
  const headers = { "x-prefiller-host-port": new URL(p.url).host };
  const answer = await post(`${first}/v1/completions`, { prompt: "a" }, { headers });
  expect(await answer.json()).toEqual(COMPLETION);
  running.child.kill("SIGTERM");
  expect(await running.exited).toBe(0);
});

test("kv-proxy --kubernetes-pods finds a prefill and a decode instance by the role labels of their pods", async () => {
  const [p, d] = [await upstream(prefillOk), await upstream(decodeOk)];
  const pod = (role: string, url: string) => ({
    metadata: { uid: role, resourceVersion: "1", labels: { "llm-d.ai/role": role } },
    spec: { containers: [{ ports: [{ name: "http", containerPort: Number(portOf(url)) }] }] },
    status: { podIP: "127.0.0.1", conditions: [{ type: "Ready", status: "True" }] },
  });
  const items = [pod("prefill", p.url), pod("decode", d.url)];
  const asked: string[] = [];
  const api = await upstream(({ path, response }) => {
    asked.push(path);
    // The watch stays open.
    if (!path.includes("watch=true"))
      sendJson(response, { metadata: { resourceVersion: "5" }, items });
  });
  const folder = mkdtempSync(join(tmpdir(), "kv-proxy-kubernetes-"));
  const config = {
    clusters: [{ name: "c", cluster: { server: api.url, "insecure-skip-tls-verify": true } }],
    users: [{ name: "u", user: {} }],
    contexts: [{ name: "x", context: { cluster: "c", user: "u" } }],
    "current-context": "x",
  };
  const KUBECONFIG = join(folder, "config");
  writeFileSync(KUBECONFIG, JSON.stringify(config));
  try {
    const flags = "--kubernetes-pods app=vllm --kubernetes-namespace models --pairing off --port 0";
    const running = startCli(flags, { KUBECONFIG });
    const url = /^kv-proxy ready (\S+)/.exec(await running.line())?.[1] ?? "";
    await expect.poll(async () => (await fetch(`${url}/health`)).status).toBe(200);
    expect(await (await post(`${url}/v1/completions`, { prompt: "a" })).json()).toEqual(COMPLETION);
    expect(p.seen.some(({ path }) => path === "/v1/completions")).toBe(true);
    expect(asked[0]).toBe("/api/v1/namespaces/models/pods?limit=500&labelSelector=app%3Dvllm");
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test("kv-proxy without instances prints a hint and exits with 2", async () => {
  const running = startCli("--port 0");
  expect(await running.exited).toBe(2);
  expect(running.stderr()).toBe(
    "kv-proxy: no prefill instance is given [KV_CONFIG_INVALID]\n  give --prefill http://host:port, one or more, or a discovery\n",
  );
});

test("kv-proxy exits with 2 when its admin port is taken", async () => {
  const p = await upstream(prefillOk);
  const running = startCli(
    `--prefill ${p.url} --decode ${p.url} --port 0 --admin-port ${portOf(p.url)}`,
  );
  expect(await running.exited).toBe(2);
  expect(running.stderr()).toContain(`cannot listen on 127.0.0.1:${portOf(p.url)} (EADDRINUSE)`);
  expect(await running.line()).not.toContain("ready");
});
