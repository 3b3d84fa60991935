// A long suite: starts kv-proxy with worker processes.
import { readFileSync } from "node:fs";
import { COMPLETION, decodeOk, prefillOk } from "@kv/testing/http/fake-upstream";
import { expect, test } from "vitest";
import { idsOf, outputOf, TurnServers } from "../readback/turn-servers.js";
import { send } from "../support/plain-client.js";
import { startCli } from "../support/run-cli.js";
import { upstream } from "../support/set-up.js";

/** The parts of answers that the tests read. */
type Json = { readonly length: number; readonly requests: Record<string, number> } & string;

const MINUTE = 60_000;
const FLAGS = "--port 0 --admin-port 0 --pairing off --health-interval-ms 0 --workers 2";

/** Connections are dealt to the workers in turn. */
async function ask(url: string, body?: unknown, path = "/v1/completions") {
  const answer = await send(`${url}${path}`, body);
  return { status: answer.status, json: parsed(answer.body) };
}

const eventually = <T>(value: () => T) => expect.poll(value, { timeout: 20_000 });
const parsed = (text: string): Json => (/^[[{]/.test(text) ? JSON.parse(text) : (text as Json));
const completion = (url: string) => ask(url, { prompt: "a" });
const workersOf = (pid: number | undefined) =>
  readFileSync(`/proc/${pid}/task/${pid}/children`, "utf8").trim().split(/\s+/).map(Number).sort();

async function startWorkers(args: string) {
  const running = startCli(`${FLAGS} ${args}`);
  const [, url = "", adminUrl = ""] =
    /^kv-proxy ready (\S+) .* admin (\S+)$/.exec(await running.line()) ?? [];
  const requests = async () => (await ask(adminUrl, undefined, "/status")).json.requests;
  const counted = async () => {
    const { json: text } = await ask(adminUrl, undefined, "/metrics");
    return Number(/^kv_proxy_requests_total\{.*outcome="200"\} (\d+)/m.exec(text)?.[1] ?? 0);
  };
  return { ...running, url, adminUrl, requests, counted };
}

test("two workers serve one port; instances, counts and the end of a worker are as of one proxy", {
  timeout: 2 * MINUTE,
}, async () => {
  const p = await upstream(prefillOk);
  let hold = false;
  const held: Parameters<typeof decodeOk>[0][] = [];
  const d = await upstream((seen) => (hold ? void held.push(seen) : decodeOk(seen)));
  const late = await upstream(decodeOk);
  const group = await startWorkers(`--prefill ${p.url} --decode ${d.url}`);
  const { url, adminUrl } = group;
  for (let i = 0; i < 4; i += 1) expect((await completion(url)).json).toEqual(COMPLETION);
  await eventually(group.requests).toMatchObject({ total: 4, succeeded: 4, in_flight: 0 });
  expect(await group.counted()).toBe(4);
  // What a client's port shows is of all workers too.
  expect((await ask(url, undefined, "/status")).json.requests).toMatchObject({ total: 4 });

  // One change reaches both workers, and the worker that comes later.
  const change = (name: string, instance: string) =>
    ask(adminUrl, { role: "decode", instance }, `/instances/${name}`);
  expect((await change("add", late.url)).json).toHaveLength(2);
  expect((await change("add", late.url)).status).toBe(409);
  hold = true;
  // Each worker has asked the late one for its models.
  const [before, lateBefore] = [d.seen.length, late.seen.length];
  // One after another: of connections that come at once, a busy worker gets fewer.
  const asked: Promise<unknown>[] = [];
  for (let count = 1; count <= 4; count += 1) {
    asked.push(completion(url).catch((error: Error) => error));
    await eventually(() => d.seen.length - before + late.seen.length - lateBefore).toBe(count);
  }
  // Each instance gets two: one of each worker.
  await eventually(() => [d.seen.length - before, late.seen.length - lateBefore]).toEqual([2, 2]);
  const [killed, other] = workersOf(group.child.pid);
  if (killed !== undefined) process.kill(killed, "SIGKILL");
  await eventually(() => workersOf(group.child.pid).includes(killed ?? 0)).toBe(false);
  await eventually(() => workersOf(group.child.pid).length).toBe(2);
  expect(workersOf(group.child.pid)).toContain(other);
  hold = false;
  for (const seen of held) if (!seen.response.destroyed) void decodeOk(seen);
  const ended = await Promise.all(asked);
  expect(ended.filter((one) => one instanceof Error)).toHaveLength(1);
  await eventually(group.stderr).toContain('"event":"worker-started"');

  // The four before count still, and the three that ended after.
  expect(await group.counted()).toBeGreaterThanOrEqual(5);
  expect((await change("drain", d.url)).status).toBe(200);
  const drainedAt = d.seen.length;
  for (let i = 0; i < 4; i += 1) expect((await completion(url)).status).toBe(200);
  expect(d.seen.length).toBe(drainedAt);
  group.child.kill("SIGTERM");
  expect(await group.exited).toBe(0);
});

test("a worker counts the load that other workers put on an instance", {
  timeout: MINUTE,
}, async () => {
  const p = await upstream(prefillOk);
  const ds = [await upstream(() => {}), await upstream(() => {}), await upstream(() => {})];
  const urls = ds.map((d) => d.url).join(" ");
  const group = await startWorkers(
    `--prefill ${p.url} --decode ${urls} --decode-routing least-load`,
  );
  const asked: Promise<unknown>[] = [];
  const sum = () => ds.reduce((all, { seen }) => all + seen.length, 0);
  for (let i = 1; i <= 3; i += 1) {
    asked.push(completion(group.url).catch(() => undefined));
    await eventually(sum).toBe(i);
    await eventually(async () => (await group.requests()).in_flight).toBe(i);
    await new Promise((resolve) => setTimeout(resolve, 300));
  }
  // By its own requests alone, each worker would begin with the first instance.
  expect(ds.map(({ seen }) => seen.length)).toEqual([1, 1, 1]);
  group.child.kill("SIGINT");
  expect(await group.exited).toBe(0);
  await Promise.all(asked);
});

test("what one worker keeps of a turn, another one gives to P, also when a worker has ended; at the end D holds nothing (issue 48)", {
  timeout: MINUTE,
}, async () => {
  const turns = new TurnServers();
  const [p, d] = [await upstream(turns.prefill), await upstream(turns.decode)];
  const group = await startWorkers(`--prefill ${p.url} --decode ${d.url} --readback`);
  let prompt = "a prompt with more than the sixty-four tokens that are worth keeping at a D. ";
  for (let turn = 1; turn <= 6; turn += 1) {
    const { json } = await ask(group.url, { prompt, model: "m" });
    const { choices } = json as unknown as { choices: { text: string }[] };
    expect(choices[0]?.text).toBe(outputOf(idsOf({ prompt }), {}).text);
    prompt += `${choices[0]?.text} more `;
  }
  // Each worker asks D for the size of its cache, and keeps its first turn when that is known: the
  // next turn may come before. Turns are dealt to the workers in turn.
  const { reads } = turns.counts;
  expect(reads).toBeGreaterThanOrEqual(3);
  // A worker tells the others of a turn after its answer has ended. Of each turn an object is kept,
  // until it is read.
  const objects = 6 - reads;
  await eventually(
    async () => (await ask(group.adminUrl, undefined, "/status")).json,
  ).toMatchObject({
    readback: [{ objects }],
  });
  const { json: text } = await ask(group.adminUrl, undefined, "/metrics");
  expect(text).toMatch(new RegExp(`^kv_proxy_readback_used_total ${reads}$`, "m"));
  expect(text).toMatch(new RegExp(`^kv_proxy_readback_objects\\{.*\\} ${objects}$`, "m"));
  // A worker that ends takes no kept turn with it.
  const [killed = 0] = workersOf(group.child.pid);
  process.kill(killed, "SIGKILL");
  await eventually(() => workersOf(group.child.pid).includes(killed)).toBe(false);
  await ask(group.url, { prompt, model: "m" });
  expect(turns.counts.reads).toBe(reads + 1);
  group.child.kill("SIGTERM");
  expect(await group.exited).toBe(0);
  expect([turns.pinnedBlocks, turns.wrong]).toEqual([0, []]);
});

test("SIGTERM lets the requests of all workers end", { timeout: MINUTE }, async () => {
  const p = await upstream(prefillOk);
  const held: Parameters<typeof decodeOk>[0][] = [];
  const d = await upstream((seen) => void held.push(seen));
  const group = await startWorkers(`--prefill ${p.url} --decode ${d.url}`);
  const asked = [completion(group.url), completion(group.url)];
  await eventually(() => held.length).toBe(2);
  group.child.kill("SIGTERM");
  await eventually(group.stderr).toContain('"event":"closing"');
  for (const seen of held) void decodeOk(seen);
  expect((await Promise.all(asked)).map(({ status }) => status)).toEqual([200, 200]);
  expect(await group.exited).toBe(0);
});

test("workers that cannot listen end the program with the reason", {
  timeout: MINUTE,
}, async () => {
  const p = await upstream(prefillOk);
  const port = new URL(p.url).port;
  const running = startCli(
    `--prefill ${p.url} --decode ${p.url} --pairing off --workers 2 --port ${port}`,
  );
  expect(await running.exited).toBe(2);
  expect(running.stderr()).toContain(`cannot listen on 127.0.0.1:${port} (EADDRINUSE)`);
});
